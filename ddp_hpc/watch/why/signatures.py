"""The registry of failures: for each class its texts with their roles, what it means, and what to do. Data; pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Role = Literal["root", "either", "confirmation", "cascade"]
"""What a text proves. root: this rank failed for a reason of its own. either: it did, if no rank has a root. confirmation: a root of
this class is right. cascade: another rank has failed before."""

Source = Literal["exception", "line"]
"""Where a text counts: as an exception that ended a process (`Type: message`), or as the beginning of a line in a log."""


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """A text that tools print, and what it proves; `tests/failure_texts.py` has one as it is printed."""

    regex: str
    role: Role = "root"
    source: Source = "exception"


@dataclass(frozen=True, kw_only=True)
class FailureClass:
    """One class of failures."""

    title: str
    means: str
    to_do: str
    """With the exact key or command; {run}, {rank}, {attempt}, and {again}, what a new submission does, are filled in."""
    patterns: Sequence[Pattern] = ()


def _on_exception(regex: str, role: Role = "root") -> Pattern:
    return Pattern(regex=regex, role=role)


def _on_line(regex: str, role: Role = "root") -> Pattern:
    return Pattern(regex=regex, role=role, source="line")


def _on_any_exception(text: str) -> Pattern:
    """Return the pattern of an exception of any type that begins with a text."""
    return _on_exception(_ERROR + re.escape(text))


def _on_os_error(number: int, text: str) -> Pattern:
    """Return the pattern of an error of the system: Python names its number, in every language; C++ its English text, in a RuntimeError."""
    return _on_exception(_ERROR + rf".*\[Errno {number}\]|RuntimeError: .*{text}")


def _logged(numbers: str) -> Pattern:
    """Return the pattern of what ddp-hpc goes on after, as a save that fails: the reason only where nothing else says one, as a full disk takes no report."""
    return _on_line(rf"\d{{4}}-\d\d-\d\d \S+ (?:WARNING|ERROR) .*\[Errno {numbers}\]", "either")


def _on_cancellation(why: str) -> Pattern:
    """Return the pattern of the line by which Slurm says why it cancels a job or a step."""
    return _on_line(
        _TIME_REGEX + _STEPD + rf"\*\*\* (?:STEP|JOB) \S+ ON \S+ CANCELLED AT \S+ DUE TO {why}", "confirmation"
    )


_ERROR = r"(?:[\w.]*\.)?\w*(?:Error|Exception): "
"""Any exception's type."""
_NETWORK_ERROR = r"(?:[\w.]*\.)?DistNetworkError: "
_LOADER_KILL = r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) is killed by signal: {0}"
"""A process of a DataLoader that a signal ended."""
_GPU_FAULT = r"CUDA error: (?:uncorrectable (?:NVLink|ECC)|an illegal memory access|unspecified launch failure|misaligned address|unknown error)"
_ASSERT = r"CUDA error: device-side assert"
_ABORT_PREFIX = r"(?:(?:\[[EF]\d*\s|  what\(\):  ).*group watchdog thread terminated with exception: |  what\(\):  )"
"""NCCL's watchdog, or C++, says why it aborts its process."""
_TIME_REGEX = r"(?:\[?\d[\d:.T-]*\]? )?"
"""A time in front of a daemon's line."""
_STEPD = r"slurmstepd(?:-[\w.-]+)?: error: "
"""Where several slurmd share a machine, the daemon's name ends with the node's."""
_SLURM_ERROR_REGEX = _TIME_REGEX + r"(?:slurmstepd(?:-[\w.-]+)?|srun): error: .*"

REGISTRY: Mapping[str, FailureClass] = {
    "gpu-memory": FailureClass(
        title="GPU out of memory",
        means="The model, its gradients, its optimizer and one micro batch do not fit into the memory of the GPU.",
        to_do="Compute each step in smaller pieces with `train.micro_batch_size` (a script: its own batch size), or use "
        "`train.precision=bf16`. Where other processes have much of the memory (`nvidia-smi` on the node names them), end them, or take "
        "another GPU. Where much is reserved but unallocated, set `env.PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.",
        patterns=[
            _on_exception(r"(?:[\w.]*\.)?OutOfMemoryError: (?:(?:CUDA|HIP|XPU) out of memory|Allocation on device)"),
            _on_exception(r"RuntimeError: (?:CUDA|HIP) out of memory"),
            _on_exception(_ERROR + r"(?:CUDA|HIP) (?:driver )?error: out of memory"),
            _on_any_exception("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"),
            _on_exception(_ERROR + r"Unexpected error from cudaGetDeviceCount\(\).*Error 2: "),
            _on_exception(_ERROR + r".*Cuda failure (?:2 )?'out of memory'"),
        ],
    ),
    "process-limit": FailureClass(
        title="a limit of open files, processes or threads is reached",
        means="The system does not let this process open one more file, or start one more process or thread.",
        to_do="Use fewer loader processes (`data.num_workers`) and threads (`env.OMP_NUM_THREADS=1`), or raise the limit, which `ulimit -n` (files) and `ulimit -u` (processes and threads) show: on Slurm, by a line in `slurm.setup`, such as `ulimit -n 65536`.",
        patterns=[
            _on_os_error(24, "Too many open files"),
            _on_any_exception("can't start new thread"),
            _on_line(r"\S*sh: (?:line \d+: )?fork: (?!retry)"),
        ],
    ),
    "shared-memory": FailureClass(
        title="shared memory (/dev/shm) is full",
        means="Processes of the DataLoader pass batches through /dev/shm, which is too small for them. Containers often limit it to 64 MB.",
        to_do="Use fewer loader processes (`data.num_workers=2`), or give the container more shared memory (`--shm-size`).",
        patterns=[
            _on_exception(_ERROR + _LOADER_KILL.format("Bus error")),
            _on_exception(_ERROR + r"unable to (?:allocate|resize|mmap|open|write to) .*(?:shared memory|</?torch_)"),
            _on_exception(_ERROR + r".*Error while creating shared memory segment /dev/shm/nccl-"),
            _on_line(r"ERROR: Unexpected bus error encountered in worker", "confirmation"),
        ],
    ),
    "host-memory": FailureClass(
        title="host or cgroup out of memory",
        means="A process asked for more memory than the node, or the job's limit, has.",
        to_do="Use fewer workers or loader processes (`data.num_workers`); on Slurm, ask for more with `resources.mem_gb`. Where the machine's own memory ran out, `ps aux --sort -rss` on the node names what else uses it.",
        patterns=[
            _on_exception(r"(?:builtins\.)?MemoryError(?:: |$)"),
            _on_exception(r"(?:numpy\.[\w.]*)?_ArrayMemoryError: "),
            _on_exception(_ERROR + r".*DefaultCPUAllocator: (?:can't allocate memory|not enough memory)"),
            _on_any_exception("[Errno 12]"),
            _on_line(r"(?:  what\(\):  |terminate called after throwing an instance of ')std::bad_alloc"),
            _on_line(_TIME_REGEX + _STEPD + r"Detected \d+ oom[-_]kill event", "confirmation"),
            _on_line(_SLURM_ERROR_REGEX + r"(?:tasks? [\d,-]+: Out Of Memory|oom-kill)", "confirmation"),
            _on_line(r"(?:\[ *\d+\.\d+\] )?(?:Memory cgroup o|O)ut of memory: Killed process \d+", "confirmation"),
        ],
    ),
    "port": FailureClass(
        title="a port is in use",
        means="Another process on the node listens at the port where the ranks were to meet, or at one that the code binds.",
        to_do="If the script starts ranks of its own (`mp.spawn`, or torchrun in a shell script), start it without them, or set `resources.workers_per_node=1` and `resources.nodes=1`: else each worker starts its own ranks at the same port. Otherwise, do not set MASTER_PORT, so that a free port is chosen, or end the process that listens: `ss -ltnp` shows it.",
        patterns=[
            _on_exception(_ERROR + r"The server socket has failed to listen.*EADDRINUSE"),
            _on_any_exception("[Errno 98]"),
            _on_exception(_NETWORK_ERROR + "Ping failed, invalid value", "either"),  # no store answers there
        ],
    ),
    "socket-path": FailureClass(
        title="a path is too long for a Unix socket",
        means="Processes of one node, such as those of a DataLoader, meet at a socket in the directory for temporary files; its path is limited to 107 bytes.",
        to_do="Set `env.TMPDIR=/tmp`, or another short path on the node's disk, and submit the run again; a script that sets TMPDIR itself needs the same.",
        patterns=[_on_any_exception("AF_UNIX path too long")],
    ),
    "download": FailureClass(
        title="a download failed",
        means="The code downloads a file, a data set or a model, and this node does not reach the server: compute nodes often have no internet.",
        to_do="Download it on the login node first, to a directory that all nodes see, and have the code read it there: run its download "
        "once by hand, with TORCH_HOME or HF_HOME set as in the job; with Hugging Face, set `env.HF_HUB_OFFLINE=1` then.",
        patterns=[
            _on_exception(r"(?:urllib\.error\.)?URLError: <urlopen error (?:\[Errno -?\d+\]|timed out|_ssl)"),
            _on_exception(r"(?:requests|urllib3)\.exceptions\.\w+: .*(?:Max retries|Failed to (?:resolve|establish))"),
            _on_exception(r"(?:httpx|httpcore)\.(?:ConnectError|ConnectTimeout|ProxyError): ?"),
            _on_exception(r"(?:[\w.]+\.)?(?:LocalEntryNotFoundError|OfflineModeIsEnabled): "),
            _on_exception(r"(?:OSError|ConnectionError): (?:We couldn't connect to|Couldn't reach) "),
            _on_exception(r"aiohttp\.(?:[\w.]+\.)?ClientConnector\w*Error: "),
        ],
    ),
    "dns": FailureClass(
        title="a host name cannot be resolved",
        means="This node cannot resolve a host name to an address.",
        to_do="Try `getent hosts NAME` on that node. If it prints nothing, use an IP address, or ask the administrators about DNS.",
        patterns=[
            _on_exception(r"(?:socket\.)?gaierror: \[Errno -\d+\]"),
            _on_exception(_ERROR + r".*\(gai error: -\d+"),
        ],
    ),
    "no-gpu": FailureClass(
        title="the code uses CUDA, and this process has no GPU",
        means="The run asks for no GPUs (`resources.gpus_per_node` is not set, or 0), or the node has none, or no driver.",
        to_do="Set `resources.gpus_per_node` to the number of GPUs of each node. Where it is set, run `nvidia-smi` on the node; if that "
        "shows none, exclude the node (`slurm.exclude`).",
        patterns=[
            _on_any_exception("Found no NVIDIA driver on your system"),
            _on_any_exception("No CUDA GPUs are available"),
        ],
    ),
    "driver": FailureClass(
        title="PyTorch and the GPU's driver do not fit together",
        means="The node's NVIDIA driver is missing, not ready, or too old for this build of PyTorch, or this build has no code for its GPUs.",
        to_do="Run `nvidia-smi` on the node; install a PyTorch for its CUDA version, or exclude the node (`slurm.exclude`).",
        patterns=[
            _on_exception(_ERROR + r".*driver version is insufficient for CUDA runtime version"),
            _on_any_exception("The NVIDIA driver on your system is too old"),
            _on_any_exception("Unexpected error from cudaGetDeviceCount()"),
            _on_any_exception("CUDA error: no kernel image is available"),
            _on_any_exception("Torch not compiled with CUDA enabled"),
            _on_line(r"Failed to initialize NVML: Driver/library version mismatch", "confirmation"),
        ],
    ),
    "wrong-device": FailureClass(
        title="wrong device",
        means="A rank uses a GPU that it does not have, that another rank uses, or tensors on different devices.",
        to_do="Have each rank use `cuda:LOCAL_RANK`, not a fixed number; compare `resources.gpus_per_node` with `nvidia-smi -L` on the node, and do not set CUDA_VISIBLE_DEVICES.",
        patterns=[
            _on_any_exception("CUDA error: invalid device ordinal"),
            _on_any_exception("Expected all tensors to be on the same device"),
            _on_exception(_ERROR + r".*Duplicate GPU detected"),
            _on_exception(r"(?:ConfigError: )?This node has \d+ workers that need a GPU each"),
        ],
    ),
    "device-assert": FailureClass(
        title="an index or a label is out of range on the GPU",
        means="A CUDA kernel checked its input and stopped. Mostly an index of an embedding, or a label of a loss, is not smaller than the number of classes.",
        to_do="Compare the labels and the indexes with the sizes. CUDA reports it at a later call, perhaps of a later step: submit the run "
        "again with `env.CUDA_LAUNCH_BLOCKING=1` behind its other settings, and the traceback names the line.",
        patterns=[
            _on_exception(_ERROR + r"(?:.*Cuda failure.*|CUDA error: )device-side assert"),
            _on_line(_ABORT_PREFIX + _ASSERT),
        ],
    ),
    "nccl-network": FailureClass(
        title="no network connects the nodes",
        means="NCCL found no network interface, or there is no route from this node to the address of another one.",
        to_do="Set `network.interfaces` to the one that connects the nodes; NCCL_DEBUG=INFO prints which one NCCL takes.",
        patterns=[
            _on_exception(_ERROR + r".*Bootstrap : no socket interface found"),
            _on_exception(_NETWORK_ERROR + ".*(?:No route to host|Network is unreachable)", "either"),
            _on_exception(
                r"(?:[\w.]*\.)?(?:DistBackendError|RuntimeError): .*NCCL.*[cC]onnect to \S+ failed ?: (?:No route to host|Network is unreachable)",
                "either",
            ),
        ],
    ),
    "gpu-fault": FailureClass(
        title="a GPU, or a kernel on it, has failed",
        means="The device reported an error that ends every process that uses it: a fault of the hardware, or a kernel that accessed wrong memory.",
        to_do="Look for `Xid` in `dmesg` of the node. If there is one, exclude the node (`slurm.exclude`) and report it; if there "
        "is none, submit the run again with `env.CUDA_LAUNCH_BLOCKING=1`, and the traceback names the kernel's call.",
        patterns=[
            _on_exception(_ERROR + _GPU_FAULT),
            _on_any_exception("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
            _on_line(_ABORT_PREFIX + _GPU_FAULT),
            _on_line(r"(?:\[ *\d+\.\d+\] )?NVRM: Xid", "confirmation"),
        ],
    ),
    "quota": FailureClass(
        title="quota exceeded",
        means="Your quota of bytes or files on that file system is used up.",
        to_do="Delete what you do not need (`ddp-hpc delete OLD_RUN`; `checkpoint.keep_last` keeps fewer checkpoints), and submit the run again: {again}.",
        patterns=[_on_os_error(122, "Disk quota exceeded"), _logged("122")],
    ),
    "disk-full": FailureClass(
        title="the disk is full, or a file may not become larger",
        means="A write failed: the file system has no space left, or the limit for the size of a file is reached (`ulimit -f`).",
        to_do="Free space on the file system that the evidence names (`df -h` and `df -i` there, on that node; `ulimit -f`), and submit the run again: {again}. To go on in another `runs_dir`, move the run's whole directory there first.",
        patterns=[
            _on_os_error(28, "No space left on device"),
            _on_os_error(27, "File too large"),
            _on_exception(_ERROR + r"(?:.*PytorchStreamWriter failed writing file|basic_ios::clear: iostream error)"),
            _logged("2[78]"),
        ],
    ),
    "stale-mount": FailureClass(
        title="a file system does not answer, or its mount is stale",
        means="The file server was restarted or is unreachable, or the file was replaced on another node.",
        to_do="Run `ls` on the path that the evidence names, on that rank's node. If it fails, exclude the node (`slurm.exclude`) and report it to the administrators.",
        patterns=[
            _on_os_error(116, "Stale file handle"),
            _on_exception(_ERROR + r".*\[Errno 107\]"),
            _on_exception(_ERROR + r".*\[Errno 5\]"),
        ],
    ),
    "not-saved": FailureClass(
        title="no checkpoint could be written",
        means="A checkpoint could not be written, at the end of the training or for longer than `checkpoint.max_failing_s`, so the run ended: what it "
        "trained since the newest checkpoint is lost.",
        to_do="Try to write a file into the run's directory, on that rank's node: the evidence says what failed. Repair that, then submit again: "
        "the run continues from its newest checkpoint.",
        patterns=[
            _on_exception("CheckpointError: .*: another rank has failed", "cascade"),
            _on_exception(r"(?:CheckpointError|NotSavedError): "),
        ],
    ),
    "nan": FailureClass(
        title="the loss or a gradient is not finite (NaN)",
        means="The training has diverged: a value became infinite or NaN.",
        to_do="Lower `train.lr`, or limit the gradients with `train.grad_clip_norm`, and submit the run again: {again}.",
        patterns=[
            _on_exception(_ERROR + r".*NaN found in input tensor"),
            _on_exception(_ERROR + r"Function '\w+' returned nan values"),
            _on_exception(r"DivergedError: "),
        ],
    ),
    "ranks-differ": FailureClass(
        title="the ranks do not have equal weights",
        means="All ranks of a training by DDP have the same weights, to the bit. Where they do not, a processor or its memory was wrong, or the "
        "code does not do the same on each rank.",
        to_do="The run starts again, without the nodes of the named ranks if it can: report these nodes to the site's "
        "administrators. If the run ended because the same difference came twice, look for it in the code: docs/integrity.md.",
        patterns=[_on_exception(r"(?:RanksDifferError: )?the ranks differ after step \d+")],
    ),
    "import": FailureClass(
        title="a module cannot be imported",
        means="Python on that node does not find a module or a library, or the module itself fails while it is imported.",
        to_do="Try `python -c 'import MODULE'` in the same environment, on a node; install what is missing, or name the right environment. Start a script that has relative imports as a module (`-- python -m pkg.train`).",
        patterns=[
            _on_exception(r"(?:ModuleNotFoundError|ImportError): "),
            _on_exception(r"(?:ConfigError: )?`recipe\.target` is .*but importing "),
            _on_line(r"\S*python[\d.]*: (?:No module named |Error while finding module specification)"),
        ],
    ),
    "data": FailureClass(
        title="a sample cannot be read",
        means="The data set raised an error for this sample or file.",
        to_do="Load that sample alone, on the same node; repair the file that the evidence names, or leave it out of the data set.",
        patterns=[
            _on_exception(r"(?:[\w.]*\.)?SampleError: "),
            _on_exception(r"(?:PIL\.)?UnidentifiedImageError: "),
            _on_exception(_ERROR + r"Caught \w+ in DataLoader worker process"),
        ],
    ),
    "peer-gone": FailureClass(
        title="a rank lost its connection to another rank",
        means="Another rank's process ended first; this error follows from that, and is not the cause.",
        to_do="Find the rank that ended first: `ddp-hpc logs {run} --attempt {attempt} --all`, and `dmesg` on its node.",
        patterns=[
            _on_exception(
                r"RuntimeError: (?:\[\S*gloo/\S+\] .*(?:onnection closed by peer|onnection reset by peer|Broken pipe|Socket closed)|Connection closed by peer \[\S+\]:\d+)",
                "cascade",
            ),
            _on_exception(_ERROR + r".*ncclRemoteError", "cascade"),
            _on_exception(_ERROR + r".*NCCL communicator was aborted", "cascade"),
            _on_exception(_ERROR + r"NCCL error.*Connection closed by remote peer", "cascade"),
            _on_exception(
                r"(?:[\w.]*\.)?(?:Dist\w*Error: |RuntimeError: \[c10d\]).*(?:Connection closed by peer|Connection reset by peer|Broken pipe|Socket closed)",
                "cascade",
            ),
            _on_exception(
                _NETWORK_ERROR + "(?!.*(?:The server socket has failed|The client socket has timed out))",
                "cascade",
            ),
            _on_line(_ABORT_PREFIX + r"NCCL error.*remote process exited", "cascade"),
        ],
    ),
    "ranks-missing": FailureClass(
        title="not all ranks joined",
        means="Some ranks did not join the process group within its timeout.",
        to_do="Read the logs of the ranks that are missing: `ddp-hpc logs {run} --attempt {attempt} --all`.",
        patterns=[
            _on_exception(_ERROR + r"Timed out after \d+ seconds waiting for clients", "either"),
            _on_exception(_NETWORK_ERROR + "The client socket has timed out", "either"),
            _on_exception(_ERROR + r"(?:Gloo connectFullMesh failed|.*wait timeout after \d+ms, keys: )", "either"),
        ],
    ),
    "collective-timeout": FailureClass(
        title="a collective operation timed out (NCCL or gloo)",
        means="Some rank did not take part in a collective operation in time: it is slow, it waits for something else, or the network fails.",
        to_do="Find the rank that did not come: its log has no such message, or another SeqNum. Compare `ddp-hpc logs {run} --attempt {attempt} --all`.",
        patterns=[
            _on_line(r"\[E.*ProcessGroupNCCL\.cpp.*Watchdog caught collective operation timeout", "either"),
            _on_line(r"\[[EF]\d*\s.*due to ProcessGroupNCCL watchdog hang", "either"),
            _on_exception(_ERROR + r".*Watchdog caught collective operation timeout", "either"),
            _on_exception(
                _ERROR
                + r".*(?:Timed out waiting \d+ms for |Application timeout caused pair closure|(?:to pass|reached) monitoredBarrier)",
                "either",
            ),
        ],
    ),
    "image": FailureClass(
        title="the container's image cannot be used",
        means="The container runtime could not open, pull or mount the image.",
        to_do="Check the image with `ddp-hpc container check`, and that every node sees the file of `container.image`.",
        patterns=[
            _on_line(
                r"FATAL: +(?:could not open image|container creation failed|while (?:extracting|loading|making image)|[Uu]nable to (?:pull|handle))"
            ),
            _on_line(_TIME_REGEX + _STEPD + r"pyxis: "),
            _on_line(r"(?:docker: )?Error response from daemon: "),
            _on_line(r"Error: (?:initializing source|unable to (?:copy from source|find image))"),
        ],
    ),
    "launch-failed": FailureClass(
        title="the workers could not be started",
        means="Slurm, the agent of a node, or the system could not start the command.",
        to_do="Read `ddp-hpc logs {run}` for the message of srun or of the agent; check the command, and the node that it names.",
        patterns=[
            _on_line(_TIME_REGEX + r"srun: error: (?:Unable to create step|Task launch for|Application launch failed)"),
            _on_line(_TIME_REGEX + _STEPD + r"execve\(\): "),
            _on_line(r"(?:error: )?\S+ cannot be executed: "),
            _on_line(r"\S*sh: (?:line \d+: )?\S+: (?:command not found|No such file or directory|Permission denied)"),
        ],
    ),
    "preempted": FailureClass(
        title="Slurm preempted the job",
        means="A job of higher priority took the nodes.",
        to_do="If the run was not started again, submit it: {again}.",
        patterns=[_on_cancellation("PREEMPTION")],
    ),
    "time-limit": FailureClass(
        title="the job reached its time limit",
        means="Slurm ends a job at its limit; a checkpoint is written before that.",
        to_do="Submit the run again: {again}. A job that ends before its first checkpoint needs a larger `resources.time_limit_min`, or a smaller `checkpoint.every_steps`.",
        patterns=[_on_cancellation("TIME LIMIT")],
    ),
    "node-failed": FailureClass(
        title="a node failed",
        means="A node is down by Slurm's records, or stopped answering.",
        to_do="If the run was not started again on other nodes, exclude the node (`slurm.exclude`) and submit again.",
        patterns=[_on_line(_SLURM_ERROR_REGEX + r"(?:DUE TO NODE FAILURE|[Nn]ode failure on)", "confirmation")],
    ),
    "preflight": FailureClass(
        title="the check of the nodes before the training failed (`preflight`)",
        means="Before any worker started, a node differed from the others, or something that all of them need was missing; "
        "preflight.json beside the attempt's logs has each finding.",
        to_do="Correct what the evidence names, or exclude the node (`slurm.exclude`), and submit the run again; "
        "`preflight.on_fail=exclude` leaves such nodes out. `ddp-hpc doctor --nodes N` checks nodes without a run.",
    ),
    "cancelled": FailureClass(
        title="the user cancelled the run",
        means="`ddp-hpc cancel` or `scancel` ended the run.",
        to_do="If the run should go on, submit it again: {again}.",
    ),
    "hang-behind": FailureClass(
        title="a hang: the others wait for one rank",
        means="No rank made progress, and one rank is elsewhere while all others wait for it in a collective operation.",
        to_do="Read where that rank is in the file of stacks. If its work may take longer, raise `restart.hang_timeout_s`.",
    ),
    "hang-mismatch": FailureClass(
        title="a hang: ranks wait in different collective operations",
        means="All ranks wait, but not in the same call: the code took different branches on different ranks.",
        to_do="Compare the ranks' lines in the file of stacks: every rank must call the same collective operations in the same order.",
    ),
    "hang-nobody": FailureClass(
        title="a hang: all ranks wait in the same operation",
        means="Every rank waits in the same call, and none is behind: the network or a device does not move the data.",
        to_do="Check the network between the nodes, and try another one with `network.interfaces`.",
    ),
    "hang-network": FailureClass(
        title="nodes do not reach each other on the network",
        means="After the ranks had stopped making progress, the nodes probed each other on the network of the workers: packets do not pass to or from the named node, or between the named pair of nodes.",
        to_do="Report the nodes to the administrators. A node that no other reaches is left out of the next job; for a pair, exclude one of the two: `slurm.exclude`. Or use another network: `network.interfaces`.",
    ),
    "hang": FailureClass(
        title="a hang",
        means="No rank made progress for longer than `restart.hang_timeout_s`, and nothing proves which rank the others waited for, or that all waited.",
        to_do="If a step may take that long, raise `restart.hang_timeout_s`; else look where it waits, with `py-spy dump` on the node, before the timeout.",
    ),
    "suspended": FailureClass(
        title="the job was suspended for too long",
        means="Slurm suspended the job for longer than the hang timeout.",
        to_do="Raise `restart.hang_timeout_s`.",
    ),
    "native-crash": FailureClass(
        title="native code crashed",
        means="A library in C, C++ or CUDA ended the process by a signal (segmentation fault, abort, bus error, illegal instruction).",
        to_do="Read the last lines of that rank: `ddp-hpc logs {run} --attempt {attempt} --rank {rank}`. PYTHONFAULTHANDLER=1 in the environment prints the Python stack of such a crash.",
        patterns=[
            _on_exception(
                _ERROR
                + _LOADER_KILL.format("(?:Segmentation fault|Aborted|Illegal instruction|Floating point exception)")
            ),
            _on_exception(_ERROR + r"process \d+ terminated with signal SIG(?:SEGV|ABRT|BUS|ILL|FPE)"),
            _on_line(r"Fatal Python error: ", "either"),
            _on_line(
                r"(?:double free or corruption|free\(\): invalid|munmap_chunk\(\): invalid|malloc\(\): |corrupted size vs\. prev_size|\*\*\* stack smashing detected|\*\*\* buffer overflow detected)",
                "either",
            ),
            _on_line(r"terminate called (?:after throwing an instance of|without an active exception)", "either"),
        ],
    ),
    "killed": FailureClass(
        title="killed by SIGKILL, and no record says by whom",
        means="The kernel sends SIGKILL when memory runs out; a user, Slurm or another program may send it, too. No record shows which.",
        to_do="Look for `oom` in `dmesg` of the node; on Slurm, `sacct -j JOB --format=State,ExitCode,MaxRSS`. If memory ran out, use fewer workers or loader processes; on Slurm, raise `resources.mem_gb`.",
        patterns=[
            _on_exception(_ERROR + _LOADER_KILL.format("Killed")),
            _on_exception(_ERROR + r"process \d+ terminated with signal SIGKILL"),
        ],
    ),
    "signal": FailureClass(
        title="ended by a signal",
        means="A signal that no crash causes, such as SIGTERM, ended the process.",
        to_do="Find out who sent it: a user, Slurm, or the program itself.",
    ),
    "supervisor-died": FailureClass(
        title="the supervisor of the job died",
        means="The process that starts the attempts was killed, so it did not record how the attempt ended.",
        to_do="Submit the run again. On Slurm, `sacct -j JOB` shows what became of the job.",
    ),
    "arguments": FailureClass(
        title="the script rejects its arguments",
        means="The script's own reader of its command line (argparse, click, Typer, absl, Hydra, ...) rejects a word of it.",
        to_do="Correct the words after `--` that the message names, and submit the run again.",
        patterns=[
            _on_line(
                r"(?:\S+\.py|python\S* -m \S+): error: |error: (?:Parser key|Validation failed|Unrecognized arguments)"
            ),  # argparse, jsonargparse
            _on_line(
                r"(?:Error: | )(?:Invalid value|Missing (?:option|argument|parameter|command)|No such (?:option|command)|Got unexpected extra)",
                "either",
            ),
            _on_line(r"FATAL Flags parsing error:"),
            _on_line(r" (?:Error parsing --|Unrecognized options: |Missing (?:required )?options?: )", "either"),
            _on_line(r"ERROR: (?:Could not consume arg|The function received no value)", "either"),
            _on_line(
                r"(?:Could not (?:override|load|append|delete) ['\w]|Error parsing override |Cannot find primary config |You must specify '"
                r"|no viable alternative at input |(?:mismatched|extraneous) input |Multiple values for )",
                "either",
            ),
        ],
    ),
    "exit-code": FailureClass(
        title="the program exited with a code of its own",
        means="No record and no log proves that an exception ended it: it called `sys.exit` or `os._exit`, its shell passed a code on, or a library printed the exception in a form of its own.",
        to_do="Look up that code in the program: `ddp-hpc logs {run} --attempt {attempt} --rank {rank}` has what it printed before.",
    ),
    "user-exception": FailureClass(
        title="an exception in the user's code",
        means="The code of the model, the recipe or the script raised an exception that nothing caught.",
        to_do="Correct the code at the line that the evidence names, and submit the run again: {again}.",
        patterns=[_on_exception(r"(?:ConfigError: )?`[^`]+` was called with `recipe\.args` .* and raised ")],
    ),
    "configuration": FailureClass(
        title="the configuration or the input is invalid",
        means="The run was refused, because it fails in the same way each time.",
        to_do="Change what the message names, and submit the run again.",
    ),
    "unknown": FailureClass(
        title="unknown",
        means="Nothing that was recorded, and no known text in the logs, says why it ended.",
        to_do="Read the logs: `ddp-hpc logs {run} --attempt {attempt} --all`; and on Slurm `sacct -j JOB --format=State,ExitCode,MaxRSS`.",
        patterns=[_on_exception(_ERROR + r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) exited unexpectedly")],
    ),
}
"""By name, in the order in which texts are compared: a more special class stands above a more general one."""


@dataclass(frozen=True)
class Match:
    """Which class a text is of, and its role."""

    name: str
    role: Role


_ADVICE = re.compile(
    r".*(?:(?i:consider (?:passing|setting|using))|For debugging consider|CUDA kernel errors might be|Compile with `?TORCH_USE_CUDA_DSA"
    r"|might be caused by|Device-side assertion tracking|If reserved but unallocated|See documentation for Memory Management"
    r"|This is typically caused by|Set(?:ting)? (?:NCCL|TORCH|PYTORCH|CUDA)_\w+)"
)
"""Lines that advise and prove nothing."""


def is_advice(text: str) -> bool:
    """Tell whether a line only advises."""
    return _ADVICE.match(text) is not None


def match_exception(text: str) -> Match | None:
    """Return the class of an exception's text, `Type: message`."""
    return _match(text, "exception")


def match_line(text: str) -> Match | None:
    """Return the class of a line of a log; a line of advice has none, unless it confirms one."""
    found = _match(text, "line")
    return None if found is not None and found.role != "confirmation" and is_advice(text) else found


def _match(text: str, source: Source) -> Match | None:
    for name, failure in REGISTRY.items():
        for pattern in failure.patterns:
            if pattern.source == source and re.match(pattern.regex, text, re.DOTALL):
                return Match(name, pattern.role)
    return None
