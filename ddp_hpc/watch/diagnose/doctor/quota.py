"""How much a user may still write where the runs are: what the tools of quotas say, where this host has them.

Lustre has a tool of its own (`lfs quota`); for others, and NFS, `quota` asks the kernel or the server. Both print, for a file
system, kibibytes and files in the same order: used, soft limit, hard limit, grace (lfs-quota(1), quota(1)). A directory's
own limit (a project quota) shows in the free space of the directory itself on most file systems.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.mounts import Mount, mount_of
from ddp_hpc.cluster.node_checks.of_files import FEW_FILES, FULL_BYTES, TIGHT_BYTES
from ddp_hpc.run.run_dir.preflight import Finding

_KIB = 1024
_NUM_COLUMNS = 8
"""Used, soft limit, hard limit, grace; of kibibytes, then of files."""
_NUMBER = re.compile(r"(\d{1,18})\*?")
"""`*` marks what is over its soft limit. Lustre brackets a number that is not sure, as a server did not answer: `[220]`."""
_TO_DO = "run `quota -s` (on Lustre `lfs quota -h -u $USER DIR`) on a host that has it, or the command that your site documents"


@dataclass(frozen=True, kw_only=True)
class Quota:
    """A user's limit on one file system."""

    of: str
    """`bytes`, `files`."""
    used: int
    limit: int
    is_over_soft: bool = False
    """Above the soft limit, nothing can be written once the grace time is over."""

    @property
    def left_bytes(self) -> int:
        return max(self.limit - self.used, 0)


def quotas_of(path: Path, environ: Mapping[str, str], *, timeout_s: float) -> Sequence[Quota]:
    """Return this user's limits where a path lies; none where there is no limit."""
    mount = mount_of(path)
    if mount is None:
        raise ConfigError(f"the file system of {path} is not known")
    argv = argv_for(mount)
    if shutil.which(argv[0], path=environ.get("PATH", "")) is None:
        raise ConfigError(f"{path} is on {mount.fs_type}, and this host does not have the command `{argv[0]}`")
    try:
        done = subprocess.run(
            argv, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"`{' '.join(argv)}` did not end within {timeout_s:.0f} s") from error
    # `quota` also ends with 1 where a limit is exceeded, so its exit code says nothing.
    found = parse(done.stdout, mount)
    if found is None:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[0]
        raise ConfigError(f"`{' '.join(argv)}` says of {mount.point}: {said}")
    return found


def argv_for(mount: Mount) -> list[str]:
    """Return the command that says the quota of this user."""
    if mount.fs_type == "lustre":
        return ["lfs", "quota", "-q", mount.point]  # it prints this word as it is
    # In raw numbers, as without -p a grace time that does not run is a column that is missing; one line for each file system.
    return ["quota", "--no-wrap", "--raw-grace", "--user"]


def parse(text: str, mount: Mount) -> list[Quota] | None:
    """Return the limits that a tool prints for a mount; none where it has no limit, None where it says nothing of it."""
    words = text.split()
    if mount.fs_type != "lustre" and words[-1:] == ["none"]:
        return []  # `Disk quotas for user ada (uid 1000): none`
    for at in (number for number, word in enumerate(words) if word in {mount.point, mount.source}):
        row = words[at + 1 : at + 1 + _NUM_COLUMNS]
        counts = [_NUMBER.fullmatch(word) for word in (*row[0:3], *row[4:7])]
        if len(row) == _NUM_COLUMNS and all(counts):
            blocks, files = [[int(found[1]) for found in counts[part : part + 3] if found] for part in (0, 3)]
            return [*_make_quota("bytes", blocks, _KIB), *_make_quota("files", files, 1)]
    return None


def _make_quota(of: str, counts: Sequence[int], unit: int) -> Iterator[Quota]:
    used, soft, hard = counts
    if soft or hard:
        yield Quota(of=of, used=used * unit, limit=(hard or soft) * unit, is_over_soft=bool(soft) and used > soft)


def findings_on_quota(quotas: Sequence[Quota] | None, why_not: str) -> Iterator[Finding]:
    """Yield what is left."""
    if quotas is None:
        yield Finding("unknown", f"ddp-hpc cannot find out how much you may still write: {why_not}", _TO_DO)
    elif not quotas:
        yield Finding("ok", "you have no limit of bytes or files on this file system")
    for one in quotas or ():
        full, tight = (FULL_BYTES, TIGHT_BYTES) if one.of == "bytes" else (1, FEW_FILES)
        left = f"{one.left_bytes} of {one.limit} files left"
        if one.of == "bytes":
            left = f"{size_text(one.left_bytes)} of {size_text(one.limit)} left"
        if one.left_bytes >= tight and not one.is_over_soft:
            yield Finding("ok", left)
            continue
        over = "; the use is above the soft limit, so writing fails after the grace time" if one.is_over_soft else ""
        to_do = "delete runs that you no longer need (`ddp-hpc delete RUN`), or ask for a higher quota"
        yield Finding("fail" if one.left_bytes < full else "warn", f"{left}{over}", to_do)


def size_text(num_bytes: int) -> str:
    """Return `77.4 GB`, or `3.1 MB`."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 10**8 else f"{num_bytes / 1e6:.1f} MB"
