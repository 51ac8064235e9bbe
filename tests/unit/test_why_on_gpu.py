"""What `why` reads from the texts of a GPU: the check that failed in a kernel, and who has the memory."""

from __future__ import annotations

import pytest

from ddp_hpc.watch.why.on_gpu import who_has_gpu_memory
from ddp_hpc.watch.why.verdict import verdict_of
from tests.unit.test_why_verdict import facts, raised

ASSERTED = "torch.AcceleratorError: CUDA error: device-side assert triggered"
IN_CUDA = "/pytorch/aten/src/ATen/native/cuda/"
THREAD = "block: [0,0,0], thread: [3,0,0] Assertion"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            f"{IN_CUDA}Loss.cu:245: nll_loss_forward_reduce_cuda_kernel_2d: {THREAD} `t >= 0 && t < n_classes` failed.",
            "a label of a loss is negative, or not smaller than the number of classes: Loss.cu (nll_loss_forward_reduce_cuda_kernel_2d) checks `t >= 0 && t < n_classes`",
        ),
        (
            f'{IN_CUDA}ScatterGatherKernel.cu:163: operator(): {THREAD} `idx_dim >= 0 && idx_dim < index_size && "index out of bounds"` failed.',
            'an index is out of range: ScatterGatherKernel.cu (operator()) checks `idx_dim >= 0 && idx_dim < index_size && "index out of bounds"`',
        ),
        (
            f"{IN_CUDA}Indexing.cu:1146: indexSelectLargeIndex: {THREAD} `srcIndex < srcSelectDimSize` failed.",
            "an index of an embedding, or of `index_select`, is not smaller than the number of rows: Indexing.cu (indexSelectLargeIndex) checks `srcIndex < srcSelectDimSize`",
        ),
        (
            f"/tmp/torchinductor_me/ab/cab.py:41: unknown: {THREAD} `index out of bounds: 0 <= tmp4 < 10` failed.",
            "an index is out of range: cab.py (unknown) checks `index out of bounds: 0 <= tmp4 < 10`",
        ),
        (
            f"../aten/src/ATen/native/cuda/NLLLoss2d.cu:106: {THREAD} `t >= 0 && t < n_classes` failed.",
            "a label of a loss is negative, or not smaller than the number of classes: NLLLoss2d.cu checks `t >= 0 && t < n_classes`",
        ),
        (f"{IN_CUDA}My.cu:7: mine: {THREAD} `a < b` failed.", "a check failed: My.cu (mine) checks `a < b`"),
        ("the user prints: index out of bounds", ""),
    ],
)
def test_the_check_of_a_kernel_that_failed_is_read_from_the_ranks_log(line: str, told: str) -> None:
    traceback = f'Traceback (most recent call last):\n  File "a.py", line 1, in f\n{ASSERTED}\n'

    found = verdict_of(facts(raised(0, traceback, step=16), logs={0: f"started\n{line}\n{line}\n{traceback}"}))

    assert (found.failure, found.step, found.in_short) == ("device-assert", 16, told)
    assert [one.text for one in found.evidence] == [ASSERTED, *([line] if told else [])]


OF_80_GIB = "CUDA out of memory. Tried to allocate 16.00 GiB. GPU 0 has a total capacity of 79.18 GiB of which 9.72 GiB is free. "
OTHERS = "Process 823 has 948.00 MiB memory in use. Process 1022 has 1.09 GiB memory in use. "


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            f"{OF_80_GIB}{OTHERS}Including non-PyTorch memory, this process has 67.40 GiB memory in use. Of the allocated memory 64.00 GiB is allocated by PyTorch, and 2.50 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try",
            "16.00 GiB more were asked for, and 9.72 of 79.18 GiB are free; this process has 67.40 GiB, of which 2.50 GiB are reserved but unallocated; 2 other processes have 2.02 GiB",
        ),
        (
            "CUDA out of memory. Tried to allocate 518.00 MiB. GPU 0 has a total capacity of 5.61 GiB of which 151.88 MiB is free. Process 114566 has 5.46 GiB memory in use. Of the allocated memory 5.29 GiB is allocated by PyTorch, and 76.48 MiB is reserved by PyTorch but unallocated.",
            "0.51 GiB more were asked for, and 0.15 of 5.61 GiB are free; this process has 5.46 GiB, of which 0.07 GiB are reserved but unallocated",
        ),
        (
            "CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a total capacty of 6.00 GiB of which 0 bytes is free. Process 7 has 512.00 MiB memory in use. Of the allocated memory 2.93 GiB is allocated by PyTorch, and 2.30 GiB is reserved by PyTorch but unallocated.",
            "1.70 GiB more were asked for, and 0.00 of 6.00 GiB are free; this process has 5.23 GiB, of which 2.30 GiB are reserved but unallocated; 1 other process has 0.50 GiB",
        ),
        (
            f"{OF_80_GIB}{'Process 7 has 9.77 GiB memory in use. ' * 7}Of the allocated memory 9.00 GiB is allocated by PyTorch, and 0.10 GiB is reserved by PyTorch but unallocated.",
            "16.00 GiB more were asked for, and 9.72 of 79.18 GiB are free; this process has 9.77 GiB, of which 0.10 GiB are reserved but unallocated; 6 other processes have 58.62 GiB",
        ),
        ("CUDA out of memory. Tried to allocate 20.00 MiB", ""),
    ],
)
def test_an_allocation_that_failed_tells_who_has_the_memory(text: str, told: str) -> None:
    error = f"torch.OutOfMemoryError: {text}"
    traceback = f'Traceback (most recent call last):\n  File "a.py", line 1, in f\n{error}\n'

    found = verdict_of(facts(raised(0, traceback), logs={0: traceback}))

    assert who_has_gpu_memory(text) == told
    assert (found.failure, found.in_short) == ("gpu-memory", told)
