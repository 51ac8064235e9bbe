"""What a GPU's own texts add up to: which check of a kernel failed, and who has the memory. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddp_hpc.watch.why.findings import EvidenceLine, Verdict
from ddp_hpc.watch.why.lines import LogLine

_ASSERTION = re.compile(
    r"(?P<file>[^\s:]+):\d+: (?:(?P<kernel>.+?): )?block: \[[\d,]+\], thread: \[[\d,]+\] Assertion `(?P<check>.+)` failed"
)
"""As the device prints it through CUDA's `assert`: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#assertion"""
_MEANING_BY_CHECK = {
    "n_classes": "a label of a loss is negative, or not smaller than the number of classes",
    "srcSelectDimSize": "an index of an embedding, or of `index_select`, is not smaller than the number of rows",
    "out of bounds": "an index is out of range",
    "input_val >= zero": "an input of a binary cross entropy is not between 0 and 1",
}
"""Part of a check -> what it means that it failed."""
_SIZE = r"([\d.]+) (bytes|[KMGT]iB)"
_GIB_OF = {"bytes": 2.0**-30, "KiB": 2.0**-20, "MiB": 2.0**-10, "GiB": 1.0, "TiB": 2.0**10}


def gpu_explanation(finding: Verdict, lines: Sequence[LogLine]) -> tuple[str, Sequence[EvidenceLine]]:
    """Return what the texts of a rank's GPU add up to, and the lines that say so; `lines` are the end of its log."""
    if finding.failure == "gpu-memory":
        return who_has_gpu_memory(finding.detail), ()
    if finding.failure == "device-assert":
        found = ((line, match) for line in lines if (match := _ASSERTION.match(line.text)))
        for line, match in found:  # the first: others follow from the same kernel
            evidence = EvidenceLine("confirmation", finding.rank, line.text, line)
            means = next((text for part, text in _MEANING_BY_CHECK.items() if part in match["check"]), "a check failed")
            kernel = f" ({match['kernel']})" if match["kernel"] else ""
            return f"{means}: {match['file'].rpartition('/')[2]}{kernel} checks `{match['check']}`", (evidence,)
    return "", ()


def who_has_gpu_memory(text: str) -> str:
    """Return who has the memory of a GPU, by PyTorch's text of an allocation that failed; empty where that does not say."""
    total, free = _gib(rf"total capaci?ty of {_SIZE}", text), _gib(rf"of which {_SIZE} is free", text)
    asked, used = _gib(rf"Tried to allocate {_SIZE}", text), _gib(rf"allocated memory {_SIZE} is allocated", text)
    kept = _gib(rf"{_SIZE} is reserved by PyTorch but unallocated", text) or 0.0
    if total is None or free is None or asked is None or used is None:
        return ""
    others = [float(number) * _GIB_OF[unit] for number, unit in re.findall(rf"Process \d+ has {_SIZE} memory", text)]
    ours = _gib(rf"this process has {_SIZE} memory", text)
    if ours is None:  # in a container, the driver knows this process by another number, so it is among the others
        ours = min((one for one in others if one >= used + kept), default=used + kept)
        if ours in others:
            others.remove(ours)
    parts = [
        f"{asked:.2f} GiB more were asked for, and {free:.2f} of {total:.2f} GiB are free",
        f"this process has {ours:.2f} GiB, of which {kept:.2f} GiB are reserved but unallocated",
    ]
    if others:
        parts.append(f"{len(others)} other process{'es have' if len(others) > 1 else ' has'} {sum(others):.2f} GiB")
    return "; ".join(parts)


def _gib(pattern: str, text: str) -> float | None:
    found = re.search(pattern, text)
    return float(found[1]) * _GIB_OF[found[2]] if found else None
