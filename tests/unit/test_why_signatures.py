"""The registry of failures: real texts of tools, decoys, and the page that is made of it."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import ddp_hpc
from ddp_hpc.cli import VERBS
from ddp_hpc.run.config.keys import all_keys
from ddp_hpc.watch.why.signatures import REGISTRY, is_advice, match_exception, match_line
from tests.failure_texts import TEXTS

DOCUMENT = Path(ddp_hpc.__file__).parents[1] / "docs/troubleshooting.md"


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in TEXTS.items() for text in texts])
def test_each_text_of_a_tool_is_of_its_class(name: str, text: str) -> None:
    found = match_exception(text) or match_line(text)

    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("name", REGISTRY)
def test_each_pattern_is_the_first_that_fits_one_of_the_texts(name: str) -> None:
    patterns = list(REGISTRY[name].patterns)
    firsts = [next(one for one in patterns if re.match(one.regex, text, re.DOTALL)) for text in TEXTS.get(name, ())]

    assert sorted(map(patterns.index, firsts)) == [*range(len(patterns))]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 1 has a total capacity of 23.69 GiB of which 5.94 MiB is free.", "gpu-memory"),
        ("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB", "gpu-memory"),
        ("OutOfMemoryError: HIP out of memory. Tried to allocate 1.50 GiB", "gpu-memory"),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 4398046511104 bytes. Error code 12 (Cannot allocate memory)", "host-memory"),
        ("MemoryError", "host-memory"),
        ("torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)", "gpu-memory"),
        ("RuntimeError: CUDA driver error: out of memory", "gpu-memory"),
        ("torch.distributed.DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: wait timeout after 600000ms, keys: /default_pg/0//cuda//0", "ranks-missing"),
        ("RuntimeError: Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:144] timed out connecting: SO_ERROR: Connection refused, remote=[10.0.0.2]:51234", "ranks-missing"),
        ("RuntimeError: [Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 60000 ms", "collective-timeout"),
        ("RuntimeError: Rank 1 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0.", "collective-timeout"),
        ("RuntimeError: Application timeout caused pair closure", "collective-timeout"),
        ("RuntimeError: unable to open shared memory object </torch_1_2_0> in read-write mode: Too many open files (24)", "process-limit"),
        ("RuntimeError: Too many open files. Communication with the workers is no longer possible. Please increase the limit using `ulimit -n` in the shell", "process-limit"),
        ("BlockingIOError: [Errno 11] Unable to create file (unable to lock file, errno = 11, error message = 'Resource temporarily unavailable')", None),
        ("torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use", "port"),
        ("torch.distributed.DistNetworkError: The client socket has failed to connect to any network address of (node1, 29500).", "peer-gone"),
        ("torch.distributed.DistNetworkError: failed to recv, got 0 bytes", "peer-gone"),
        ("torch.distributed.DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: Connection reset by peer", "peer-gone"),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", None),
        ("socket.gaierror: [Errno -3] Temporary failure in name resolution", "dns"),
        ("OSError: [Errno 28] No space left on device", "disk-full"),
        ("RuntimeError: [enforce fail at inline_container.cc:659] . unexpected pos 64 vs 0: No space left on device", "disk-full"),
        ("OSError: [Errno 116] Stale file handle: '/data/a'", "stale-mount"),
        ("ImportError: libcudart.so.12: cannot open shared object file: No such file or directory", "import"),
        ("RuntimeError: DataLoader worker (pid(s) 12, 13) exited unexpectedly", "unknown"),
        ("ValueError: my own text: CUDA out of memory", None),
        ("RuntimeError: the disk cache is out of memory", None),
        ("KeyError: 'NCCL_TIMEOUT'", None),
        ("AssertionError: expected no NaN found", None),
        ("ValueError: port 29500", None),
    ],
)  # fmt: skip
def test_an_exceptions_text_has_the_class_of_its_mechanism(text: str, name: str | None) -> None:
    found = match_exception(text)

    assert (found.name if found else None) == name


@pytest.mark.parametrize(
    "text",
    [
        "step 12: out of memory handling is on",
        "CUDA out of memory. Tried to allocate 2 GiB - retrying with half of the batch",
        "NCCL_TIMEOUT=600 TORCH_NCCL_ASYNC_ERROR_HANDLING=1",
        "init_process_group(timeout=600 s): a collective operation timeout ends the run",
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
        "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.",
        "If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "Killed",
        "Terminated",
        "Epoch 3: segmentation fault-free so far",
        "note: Connection reset by peer is normal at the end",
        "loss nan",
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
        "[W1123 10:00:00.000000 ProcessGroupNCCL.cpp:1250] Warning: destroy_process_group() was not called",
    ],
)
def test_a_line_that_proves_nothing_has_no_class(text: str) -> None:
    assert match_line(text) is None


def test_advice_is_recognised() -> None:
    assert is_advice("For debugging consider passing CUDA_LAUNCH_BLOCKING=1")
    assert not is_advice("srun: error: node1: task 3: Out Of Memory")


def test_every_class_says_what_to_do_with_keys_and_commands_that_exist() -> None:
    text = " ".join(failure.to_do for failure in REGISTRY.values())

    sections = {key.partition(".")[0] for key in all_keys()}
    keys = {key for key in re.findall(r"`([a-z]+\.[a-z_]+)", text) if key.partition(".")[0] in sections}
    assert keys <= set(all_keys())
    assert len(keys) > 5
    assert set(re.findall(r"ddp-hpc (\w+)", text)) - {*VERBS} == set()


def test_a_port_in_use_may_be_that_of_ranks_that_each_worker_starts() -> None:
    assert "If the script starts ranks of its own" in REGISTRY["port"].to_do
    assert "`resources.workers_per_node=1`" in REGISTRY["port"].to_do


def test_the_page_in_docs_is_that_of_the_registry() -> None:
    """Where this fails, put the output of `python docs/tools/failures.py` between the two markers."""
    _, _, rest = DOCUMENT.read_text(encoding="utf-8").partition("<!-- failures: begin -->\n")

    written, end, _ = rest.partition("<!-- failures: end -->")

    assert end
    assert written == runpy.run_path(str(DOCUMENT.parent / "tools/failures.py"))["as_markdown"]()
