"""The container image that workers run in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ddp_hpc.run.spec.checked import Checked, require_one_line


@dataclass(frozen=True, kw_only=True)
class ContainerSpec(Checked, section="container"):
    """The container image that the workers run in."""

    image: str | None = None
    """Image file or directory; for pyxis also an image address; for Docker an image name. Unset: no container."""
    runtime: Literal["auto", "apptainer", "singularity", "pyxis", "docker"] = "auto"
    """The container runtime. `auto`: Apptainer, or else Singularity, from the job's PATH. Docker works without Slurm only."""
    python: str = "python3"
    """Name or path of Python in the image. It must have PyTorch and the packages that ddp_hpc needs."""
    binds: tuple[str, ...] = ()
    """More paths to mount in the container, `SOURCE[:TARGET[:ro]]`."""
    gpus: Literal["auto", "nvidia", "rocm", "none"] = "auto"
    """Whose GPU driver the container gets (`--nv`, `--rocm`). `auto`: NVIDIA's, if the run asks for GPUs."""
    options: tuple[str, ...] = ()
    """More options for the runtime, one for each item (`--fakeroot`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_line("container", **vars(self))
