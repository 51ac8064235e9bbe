"""Deaths of the kinds that people report in public threads, written after the last change of the rules, and how they are made.

    python -m tests.campaigns.deaths.blind FOLDER

One of two ranks of a script prints and raises what such a thread shows (`said_script.py`), and the other one loses its connection.
The texts are the messages of the tools; no thread's own code or prose is here.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.campaigns.command_line import folder_to_fill, parser_of
from tests.campaigns.deaths.on_machine import HERE, SETTINGS, WHOLE, run_in
from tests.campaigns.deaths.table import Death
from tests.campaigns.written import stamp


@dataclass(frozen=True, kw_only=True)
class Blind(Death):
    """A death with its text."""

    raises: str = ""
    """Name of the exception's class; empty for none."""
    message: str = ""
    prints: str = ""
    """To standard error, before."""
    signal: int = 0
    code: int = 1


def _one(
    how: str,
    failure: str,
    raises: str = "",
    message: str = "",
    *,
    less: str = "",
    prints: str = "",
    signal: int = 0,
    code: int = 1,
) -> Blind:
    return Blind(
        how=f"said-{how}", workload="script", failure=failure, rank=1, victim=1, less=less, is_blind=True,
        raises=raises, message=message, prints=prints, signal=signal, code=code,
    )  # fmt: skip


NCCL = "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1333, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.18.3\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
LOADER = '{0}: Caught {0} in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  File "/env/lib/python3.10/site-packages/torch/utils/data/_utils/worker.py", line 308, in _worker_loop\n    data = fetcher.fetch(index)\n  File "/env/lib/python3.10/site-packages/torch/utils/data/_utils/fetch.py", line {1}\n{0}: {2}\n'
FETCH = '51, in <listcomp>\n    data = [self.dataset[idx] for idx in possibly_batched_index]\n  File "/home/me/data.py", line 77, in __getitem__\n    image = load(path)'
COLLATE = "54, in fetch\n    return self.collate_fn(data)"

BLIND: Sequence[Blind] = (
    _one("cuda-999", "gpu-fault", "torch.distributed.DistBackendError", NCCL + "Cuda failure 999 'unknown error'", less="driver"),
    _one("nccl-802", "driver", "torch.distributed.DistBackendError", NCCL + "Cuda failure 802 'system not yet initialized'", less="gpu-fault"),
    _one("nccl-init", "driver", "torch.distributed.DistBackendError", NCCL + "Cuda failure 'initialization error'", less="gpu-fault,wrong-device"),
    _one("cuda-802", "driver", "RuntimeError", "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that might have already set an error? Error 802: system not yet initialized"),
    _one("cuda-oom-old", "gpu-memory", "torch.cuda.OutOfMemoryError", "CUDA out of memory. Tried to allocate 96.00 MiB (GPU 1; 23.69 GiB total capacity; 22.10 GiB already allocated; 60.69 MiB free)"),
    _one("cuda-illegal", "gpu-fault", "RuntimeError", "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported at some other API call."),
    _one("cuda-assert", "device-assert", "RuntimeError", "CUDA error: device-side assert triggered\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1.", prints="../aten/src/ATen/native/cuda/Indexing.cu:1146: indexSelectLargeIndex: block: [81,0,0], thread: [0,0,0] Assertion `srcIndex < srcSelectDimSize` failed.\n"),
    _one("cublas", "gpu-fault", "RuntimeError", "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k, &alpha, a, lda, b, ldb, &beta, c, ldc)`", less="device-assert"),
    _one("cudnn-internal", "gpu-fault", "RuntimeError", "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR", less="gpu-memory,driver"),
    _one("busy-device", "wrong-device", "RuntimeError", "CUDA error: CUDA-capable device(s) is/are busy or unavailable", less="gpu-fault"),
    _one("deserialize", "wrong-device", "RuntimeError", "Attempting to deserialize object on CUDA device 2 but torch.cuda.device_count() is 1. Please use torch.load with map_location to map your storages to an existing device.", less="user-exception"),
    _one("no-gpu", "wrong-device", "ValueError", "ProcessGroupNCCL is only supported with GPUs, no GPUs found!", less="driver,user-exception"),
    _one("fork-cuda", "user-exception", "RuntimeError", "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start method", less="wrong-device"),
    _one("open-files", "process-limit", "OSError", "[Errno 24] Too many open files", less="user-exception"),
    _one("open-files-workers", "process-limit", "RuntimeError", "Too many open files. Communication with the workers is no longer possible. Please increase the limit using `ulimit -n` in the shell", less="user-exception,data"),
    _one("shm-object", "shared-memory", "RuntimeError", "unable to open shared memory object </torch_30997_2076642173> in read-write mode"),
    _one("shm-mmap", "host-memory", "RuntimeError", "unable to mmap 4096000 bytes from file </torch_4242_1_0>: Cannot allocate memory (12)", less="shared-memory"),
    _one("bus-error", "native-crash", signal=7, less="shared-memory"),
    _one("free-invalid", "native-crash", prints="free(): invalid pointer\n", signal=6),
    _one("illegal-instruction", "native-crash", signal=4),
    _one("fpe", "native-crash", signal=8),
    _one("c10-error", "native-crash", prints="terminate called after throwing an instance of 'c10::Error'\n  what():  invalid device pointer: 0x7ff443ffdc00\nException raised from free at ../c10/cuda/CUDACachingAllocator.cpp:844 (most recent call first):\n", signal=6, less="gpu-fault"),
    _one("sigkill", "killed", signal=9),
    _one("stack-size", "data", prints="Traceback (most recent call last):\n" + LOADER.format("RuntimeError", COLLATE, "stack expects each tensor to be equal size, but got [24, 32, 32] at entry 0 and [24, 32, 64] at entry 1"), less="user-exception,exit-code"),
    _one("stack-size-raised", "data", "RuntimeError", LOADER.format("RuntimeError", COLLATE, "stack expects each tensor to be equal size, but got [5] at entry 0 and [1] at entry 1").partition(": ")[2], less="user-exception"),
    _one("truncated-image", "data", "OSError", LOADER.format("OSError", FETCH, "image file is truncated (12 bytes not processed)").partition(": ")[2]),
    _one("truncated-pickle", "data", "_pickle.UnpicklingError", "pickle data was truncated", less="user-exception"),
    _one("hdf5-truncated", "data", "OSError", "Unable to open file (truncated file: eof = 96, sblock->base_addr = 0, stored_eof = 2048)", less="user-exception"),
    _one("hdf5-io", "stale-mount", "OSError", "Can't read data (file read failed: time = Thu Nov  5 11:10:01 2026, filename = '/data/train.h5', file descriptor = 9, errno = 5, error message = 'Input/output error')", less="data,user-exception"),
    _one("hdf5-lock", "user-exception", "BlockingIOError", "[Errno 11] Unable to create file (unable to lock file, errno = 11, error message = 'Resource temporarily unavailable')"),
    _one("checkpoint-zip", "user-exception", "RuntimeError", "PytorchStreamReader failed reading zip archive: failed finding central directory"),
    _one("checkpoint-write", "disk-full", "RuntimeError", "[enforce fail at inline_container.cc:588] . PytorchStreamWriter failed writing file data/12: file write failed", less="user-exception,quota"),
    _one("arrow-write", "disk-full", "OSError", "[Errno 28] Error writing bytes to file. Detail: [errno 28] No space left on device"),
    _one("permission", "user-exception", "PermissionError", "[Errno 13] Permission denied: '/scratch/project/checkpoints'"),
    _one("file-exists", "user-exception", "FileExistsError", "[Errno 17] File exists: '/out/trainer_log.jsonl'"),
    _one("port-old", "port", "RuntimeError", "The server socket has failed to listen on any local network address. The server socket has failed to bind to [::]:12211 (errno: 98 - Address already in use). The server socket has failed to bind to 0.0.0.0:12211 (errno: 98 - Address already in use)."),
    _one("hub-dns", "dns", "requests.exceptions.ConnectionError", "(MaxRetryError('HTTPSConnectionPool(host=\\'hub.example\\', port=443): Max retries exceeded with url: /config.json (Caused by NewConnectionError(\\'<HTTPSConnection object at 0x783edf828070>: Failed to establish a new connection: [Errno -3] Temporary failure in name resolution\\'))'))", less="user-exception"),
    _one("hub-429", "user-exception", "huggingface_hub.errors.HfHubHTTPError", "429 Client Error: Too Many Requests for url: https://hub.example/api/datasets/glue"),
    _one("store-barrier", "ranks-missing", "RuntimeError", "Timed out initializing process group in store based barrier on rank: 1, for key: store_based_barrier_key:1 (world_size=4, worker_count=3, timeout=0:30:00)", less="collective-timeout"),
    _one("gloo-refused", "ranks-missing", "RuntimeError", "[../third_party/gloo/gloo/transport/tcp/pair.cc:799] connect [127.0.1.1]:12345: Connection refused", less="peer-gone,nccl-network"),
    _one("watchdog-raised", "collective-timeout", "RuntimeError", "NCCL communicator was aborted on rank 1.  Original reason for failure was: [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1800324 milliseconds before timing out."),
    _one("ib-completion", "nccl-network", prints="node1:2920:3080 [0] transport/net_ib.cc:1074 NCCL WARN NET/IB : Got completion from peer 10.0.0.2<42> with error 12, opcode 0, len 0, vendor err 129\nterminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [Rank 1] NCCL watchdog thread terminated with exception: NCCL error: remote process exited or there was a network error, NCCL version 2.18.3\n", signal=6, less="peer-gone,native-crash"),
    _one("cudnn-library", "import", "ImportError", "libcudnn.so.8: cannot open shared object file: No such file or directory"),
    _one("glibcxx", "import", "ImportError", "/lib/x86_64-linux-gnu/libstdc++.so.6: version `GLIBCXX_3.4.29' not found (required by /env/lib/python3.10/site-packages/scipy/_ufuncs.so)"),
    _one("cusparse-library", "import", "OSError", "libcusparse.so.11: cannot open shared object file: No such file or directory", less="user-exception"),
    _one("reduction", "user-exception", "RuntimeError", "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that your module has parameters that were not used in producing loss."),
    _one("shape", "user-exception", "RuntimeError", "mat1 and mat2 shapes cannot be multiplied (64x784 and 512x10)"),
    _one("loss-scale", "nan", "FloatingPointError", "Minimum loss scale reached (0.0001). Your loss is probably exploding. Try lowering the learning rate, using gradient clipping or increasing the batch size.", less="user-exception"),
    _one("loss-infinite", "nan", "FloatingPointError", "Loss became infinite or NaN at iteration=1200!", less="user-exception"),
    _one("loss-exit", "nan", prints="Loss is nan, stopping training\n", code=1, less="exit-code"),
    _one("numpy-abi", "import", "ValueError", "numpy.dtype size changed, may indicate binary incompatibility. Expected 96 from C header, got 88 from PyObject", less="user-exception"),
)  # fmt: skip


def happen(death: Blind, folder: Path) -> None:
    """Run it to its end in this folder, unless that was done."""
    if (folder / WHOLE).exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(HERE / "said_script.py", folder)
    said = {
        "raises": death.raises,
        "message": death.message,
        "prints": death.prints,
        "signal": death.signal,
        "code": death.code,
    }
    (folder / "said.json").write_text(json.dumps(said))
    typed = [
        "--wait",
        "resources.workers_per_node=2",
        *SETTINGS,
        "--",
        sys.executable,
        "said_script.py",
        str(death.victim),
    ]
    run_in(folder, typed)
    (folder / WHOLE).write_text(stamp()["commit"])


def main(argv: Sequence[str] | None = None) -> int:
    """Make all."""
    parser = parser_of("tests.campaigns.deaths.blind", __doc__)
    parser.add_argument("folder", metavar="FOLDER", type=folder_to_fill, help="where the deaths are made and kept")
    folder = parser.parse_args(argv).folder.resolve()
    with ThreadPoolExecutor(3) as pool:
        for death, _ in zip(BLIND, pool.map(lambda one: happen(one, folder / one.name), BLIND), strict=True):
            print(death.name, flush=True)  # noqa: T201  it is watched
    return 0


if __name__ == "__main__":
    sys.exit(main())
