"""The cluster for the examples, as `tests/slurm` has it."""

from tests.slurm.conftest import _mended_cluster, can_boot, cluster, login, shared_dir

__all__ = ["_mended_cluster", "can_boot", "cluster", "login", "shared_dir"]
