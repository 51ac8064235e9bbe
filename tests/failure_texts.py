"""A text of each pattern of the registry of failures, as a tool prints it, by the class that it is of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

TEXTS: Mapping[str, Sequence[str]] = {
    "gpu-memory": [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB",
        "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB",
        "torch.AcceleratorError: CUDA error: out of memory",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that might have already set an error? Error 2: out of memory",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3384, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
    ],
    "shared-memory": [
        "RuntimeError: DataLoader worker (pid 4242) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. Please try to raise your shared memory limit.",
        "RuntimeError: unable to allocate shared memory(shm) for file </torch_31_1234_5>: No space left on device (28)",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3384, unhandled system error\nLast error:\nError while creating shared memory segment /dev/shm/nccl-Yx1 (size 9637888)",
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
    ],
    "host-memory": [
        "MemoryError: Unable to allocate 8.00 GiB",
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.45 GiB for an array with shape (1000000000,)",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8000000000 bytes. Error code 12 (Cannot allocate memory)",
        "OSError: [Errno 12] Cannot allocate memory",
        "  what():  std::bad_alloc",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0. Some of the step tasks have been OOM Killed.",
        "srun: error: node1: tasks 0-3,5: Out Of Memory",
        "Memory cgroup out of memory: Killed process 4242 (python) total-vm:9000kB",
    ],
    "process-limit": [
        "OSError: [Errno 24] Too many open files: '/data/7.bin'",
        "RuntimeError: can't start new thread",
        "/home/me/train.sh: line 3: fork: Resource temporarily unavailable",
    ],
    "port": [
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
        "OSError: [Errno 98] Address already in use",
        "torch.distributed.DistNetworkError: Ping failed, invalid value returned from server. Expected: 8199, Got: 1347703880",
    ],
    "socket-path": [
        "OSError: AF_UNIX path too long",
    ],
    "download": [
        "urllib.error.URLError: <urlopen error [Errno -3] Temporary failure in name resolution>",
        "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /x",
        "httpx.ConnectError: [Errno -2] Name or service not known",
        "huggingface_hub.errors.LocalEntryNotFoundError: An error happened while trying to locate the file on the Hub and we cannot find the requested files in the local cache.",
        "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached files.",
        "aiohttp.client_exceptions.ClientConnectorError: Cannot connect to host huggingface.co:443 ssl:default",
    ],
    "dns": [
        "socket.gaierror: [Errno -2] Name or service not known",
        "torch.distributed.DistNetworkError: The IPv4 network addresses of (node7, 29500) cannot be retrieved (gai error: -2 - Name or service not known).",
    ],
    "no-gpu": [
        "RuntimeError: Found no NVIDIA driver on your system.",
        "RuntimeError: No CUDA GPUs are available",
    ],
    "driver": [
        "RuntimeError: CUDA error: CUDA driver version is insufficient for CUDA runtime version",
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 804: forward compatibility was attempted on non supported HW",
        "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device",
        "AssertionError: Torch not compiled with CUDA enabled",
        "Failed to initialize NVML: Driver/library version mismatch",
    ],
    "wrong-device": [
        "torch.AcceleratorError: CUDA error: invalid device ordinal",
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
        "torch.distributed.DistBackendError: NCCL error: invalid usage\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 7000",
        "This node has 2 workers that need a GPU each, but PyTorch 2.15.0 sees 0 GPUs here",
    ],
    "device-assert": [
        "torch.AcceleratorError: CUDA error: device-side assert triggered",
        "  what():  [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: CUDA error: device-side assert triggered",
    ],
    "nccl-network": [
        "torch.distributed.DistBackendError: NCCL error: internal error\nLast error:\nBootstrap : no socket interface found",
        "torch.distributed.DistNetworkError: The client socket has failed to connect to any network address of (10.1.0.1, 29500). The client socket has failed to connect to 10.1.0.1:29500 (errno: 113 - No route to host).",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3384, unhandled system error\nLast error:\nsocketStartConnect: Connect to 10.0.0.2<4> failed : No route to host",
    ],
    "gpu-fault": [
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        "[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:1895] [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: CUDA error: uncorrectable ECC error encountered",
        "NVRM: Xid (PCI:0000:07:00): 79, pid=4242, GPU has fallen off the bus.",
    ],
    "quota": [
        "OSError: [Errno 122] Disk quota exceeded: '/scratch/me/file'",
        "2026-06-18 13:05:36,123 WARNING the checkpoint of step 6 could not be written: rank 0 on node1: OSError: [Errno 122] Disk quota exceeded",
    ],
    "disk-full": [
        "OSError: [Errno 28] No space left on device: '/tmp/cache.bin'",
        "OSError: [Errno 27] File too large",
        "RuntimeError: [enforce fail at inline_container.cc:588] . PytorchStreamWriter failed writing file data/12: file write failed",
        "2026-06-18 13:05:36,123 WARNING the checkpoint of step 6 could not be written: rank 0 on node1: OSError: [Errno 28] No space left on device",
    ],
    "stale-mount": [
        "OSError: [Errno 116] Stale file handle: '/data/train'",
        "OSError: [Errno 107] Transport endpoint is not connected: '/data'",
        "OSError: [Errno 5] Input/output error: '/data/train/7.bin'",
    ],
    "not-saved": [
        "CheckpointError: The checkpoint of step 500 was not committed: another rank has failed. Its log says why.",
        "NotSavedError: The checkpoint of step 500 could not be committed: rank 1: PermissionError: [Errno 13] Permission denied",
    ],
    "nan": [
        "RuntimeError: NaN found in input tensor.",
        "RuntimeError: Function 'MulBackward0' returned nan values in its 0th output.",
        "DivergedError: The training has diverged: the loss is not finite since step 3.",
    ],
    "ranks-differ": [
        "the ranks differ after step 40: `model/head.weight` is not equal on all of them, but must be; rank 1 on node2 was wrong (2 of 3 ranks agree).",
    ],
    "import": [
        "ModuleNotFoundError: No module named 'timm'",
        "`recipe.target` is 'm:build', but importing 'm' raised ModuleNotFoundError: No module named 'm'.",
        "/usr/bin/python3: No module named train",
    ],
    "data": [
        "SampleError: `train_data[17]` raised ValueError: bad label.",
        "PIL.UnidentifiedImageError: cannot identify image file '/data/7.jpg'",
        "KeyError: Caught KeyError in DataLoader worker process 0.",
    ],
    "peer-gone": [
        "RuntimeError: [gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:44715",
        "torch.distributed.DistBackendError: NCCL error, remote process exited or there was a network error\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1.",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1275, internal error, NCCL version 2.14.3\nncclInternalError: Internal check failed.\nLast error:\nNet : Connection closed by remote peer node2<50260>",
        "torch.distributed.DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: Connection reset by peer",
        "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
        "  what():  [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: NCCL error: remote process exited or there was a network error, NCCL version 2.21.5",
    ],
    "ranks-missing": [
        "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 3/4 clients joined.",
        "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (node7, 29500).",
        "torch.distributed.DistStoreError: wait timeout after 600000ms, keys: /default_pg/0//cuda//0",
    ],
    "collective-timeout": [
        "[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600060 milliseconds before timing out.",
        "[F321 02:07:08.408271257 ProcessGroupNCCL.cpp:1557] [PG ID 0 PG GUID 0(default_pg) Rank 0] [PG ID 0 PG GUID 0(default_pg) Rank 0] Terminating the process after attempting to dump debug info, due to ProcessGroupNCCL watchdog hang.",
        "torch.distributed.DistBackendError: [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)",
        "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
    ],
    "image": [
        "FATAL:   could not open image /images/torch.sif: no such file or directory",
        "slurmstepd: error: pyxis: failed to import docker image",
        "docker: Error response from daemon: pull access denied for torch",
        "Error: initializing source docker://torch:latest: reading manifest",
    ],
    "launch-failed": [
        "srun: error: Unable to create step for job 12: Memory required by task is not available",
        "slurmstepd: error: execve(): /opt/venv/bin/python: No such file or directory",
        "error: /home/me/train.sh cannot be executed: Permission denied",
        "bash: line 1: torchrum: command not found",
    ],
    "preempted": [
        "slurmstepd: error: *** JOB 12 ON node1 CANCELLED AT 2026-06-18T13:05:36 DUE TO PREEMPTION ***",
    ],
    "time-limit": [
        "slurmstepd: error: *** STEP 12.0 ON node1 CANCELLED AT 2026-06-18T13:05:36 DUE TO TIME LIMIT ***",
    ],
    "node-failed": [
        "slurmstepd: error: *** STEP 12.0 ON node1 CANCELLED AT 2026-06-18T13:05:36 DUE TO NODE FAILURE ***",
    ],
    "native-crash": [
        "RuntimeError: DataLoader worker (pid 4242) is killed by signal: Segmentation fault. ",
        "torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with signal SIGSEGV",
        "Fatal Python error: Segmentation fault",
        "double free or corruption (!prev)",
        "terminate called after throwing an instance of 'c10::Error'",
    ],
    "killed": [
        "RuntimeError: DataLoader worker (pid 4242) is killed by signal: Killed. ",
        "torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with signal SIGKILL",
    ],
    "arguments": [
        "train.py: error: unrecognized arguments: --foo",
        "Error: Invalid value for '--lr': 'abc' is not a valid float.",
        "FATAL Flags parsing error: Unknown command line flag 'foo'",
        " Error parsing --lr: could not convert string to float: 'abc'",
        "ERROR: Could not consume arg: --foo=1",
        "Could not override 'foo'.",
    ],
    "user-exception": [
        "`m:build` was called with `recipe.args` {} and raised ValueError: no such model",
    ],
    "unknown": [
        "RuntimeError: DataLoader worker (pid(s) 12, 13) exited unexpectedly",
    ],
}  # fmt: skip
