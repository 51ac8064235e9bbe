"""The planted defects: each is the good script with a few lines changed, the faults that show it, and the name it must get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
_STATE = '            "rng": all_ranks(torch.get_rng_state()),\n'
_OPTIMIZER = '            "optimizer": optimizer.state_dict(),\n'


@dataclass(frozen=True)
class Planted:
    """One defect."""

    name: str
    """What certify must say is the reason."""
    fault: str
    changes: Sequence[tuple[str, str]]

    @property
    def source(self) -> str:
        """The script with the defect."""
        text = (SCRIPTS / "good.py").read_text(encoding="utf-8")
        for old, new in self.changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        return text


PLANTED = (
    Planted(
        "loader workers die first",
        "preempt",
        [("generator=torch.Generator())", "generator=torch.Generator(), num_workers=1, persistent_workers=True)")],
    ),
    Planted(
        "ranks do not agree on the step of the stop",
        "term",
        [
            # Each by itself they may agree by chance, on a busy machine; here rank 1 goes on.
            ("    return bool(flag)\n", "    return stop_asked and dist.get_rank() == 0\n"),
            ("    dist.all_reduce(flag, dist.ReduceOp.MAX)\n", ""),
        ],
    ),
    Planted(
        "half-written file used",
        "kill-in-save",
        [
            (
                '    torch.save(state, f"{path}.tmp")\n    os.replace(f"{path}.tmp", path)\n',
                "    torch.save(state, path)\n",
            ),
            ('            "step": step,\n', '            "step": step,\n            "ema": torch.zeros(2_000_000),\n'),
        ],
    ),
    Planted(
        "certify does not know why; what differs first: the first loss after the resume",  # data in another order
        "kill-in-evaluation",
        [("        sampler.set_epoch(epoch)\n", "        sampler.set_epoch(epoch - first_epoch)\n")],
    ),
    Planted(
        "optimizer not restored",
        "kill-in-evaluation",
        [(_OPTIMIZER, ""), ('        optimizer.load_state_dict(saved["optimizer"])\n', "")],
    ),
    Planted(
        "its saved state has no state of a random generator",
        "kill-in-evaluation",
        [(_STATE, ""), ('        torch.set_rng_state(saved["rng"][rank])\n', "")],
    ),
    Planted(
        "scheduler not restored",
        "kill-in-evaluation",
        [
            (
                '        lr_scheduler.load_state_dict(saved["lr_scheduler"])\n',
                '        lr_scheduler.load_state_dict(saved["lr_scheduler"])\n        lr_scheduler.step()\n',
            )
        ],
    ),
    Planted(
        "ignores the stop signal",
        "term",
        [("    signal.signal(signal.SIGTERM, on_signal)\n", "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n")],
    ),
    Planted(
        "resumes from the wrong file",
        "kill-after-save",
        [
            (
                '    return max(found, key=lambda path: int(path.stem.split("_")[1])) if found else None\n',
                "    return max(FOLDER.glob('epoch_*.pt')) if found else None\n",
            )
        ],
    ),
    Planted(
        "metrics doubled",
        "kill-at-random",
        [
            (
                '        kept = [line for line in lines[1:] if int(line.split(",")[0]) <= step]\n',
                "        kept = lines[1:]\n",
            )
        ],
    ),
)
