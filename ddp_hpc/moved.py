"""Names that modules had before, until 0.10 those before the wings: jobs that wait and jobs that run hold some, users' programs import some."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType

MOVED = {
    "adapters": "train.adapters",  # users' programs
    "errors": "base.errors",  # users' programs
    "machine": "cluster.machine",  # agents that run
    "node_checks": "cluster.node_checks",  # supervisors that run
    "rendezvous": "cluster.rendezvous",  # supervisors that run
    "script": "job.script",  # supervisors that run
    "sweep": "launch.sweep",  # arrays that wait
    "cluster.machine.node": "cluster.machine.sampler",  # agents that run
    "cluster.node_checks.node": "cluster.node_checks.gather",  # supervisors that run
    "job.node.spawned": "job.node.spawned_worker",  # agents that run
    "cluster.rendezvous.links.node": "cluster.rendezvous.links.probe",  # supervisors that run
}
"""Below `ddp_hpc`: old -> new, and who asks for the old name."""


class Forward:
    """Finds a module by its old name, and gives the one of the new name: for `import`, and for `python -m`.

    Source: https://docs.python.org/3/reference/import.html#the-meta-path
    """

    def __init__(self, new: str) -> None:
        self.new = new

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        package, _, below = name.partition(".")
        if package != "ddp_hpc":
            return None
        old = next((one for one in MOVED if f"{below}.".startswith(f"{one}.")), None)
        if old is None:
            return None
        # Late, as all here: each command imports this module, and hardly one needs it.
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, Forward(f"ddp_hpc.{MOVED[old]}{below[len(old) :]}"))  # type: ignore[arg-type]

    def create_module(self, _spec: ModuleSpec) -> None:
        """Leave it to Python: `exec_module` puts the real one in its place."""

    def exec_module(self, module: ModuleType) -> None:
        from importlib import import_module

        sys.modules[module.__name__] = import_module(self.new)

    def get_code(self, _name: str) -> CodeType | None:
        from importlib.util import find_spec

        found = find_spec(self.new)
        return None if found is None else found.loader.get_code(self.new)  # type: ignore[union-attr]
