"""Imports `torch._dynamo`, the front end of `torch.compile`, only where something needs it.

It takes as long to import as the rest of PyTorch. Every optimizer and DDP import it when they are made, only to say what it
must not trace. Before anything is compiled, nothing is traced: so a stand-in answers these few calls, and imports the
package itself as soon as anything else is asked of it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

log = logging.getLogger(__name__)

DYNAMO = "torch._dynamo"


def import_compiler_late() -> None:
    """Put the stand-in where `torch._dynamo` has not been imported yet."""
    if DYNAMO in sys.modules:
        return
    # Who asks for what: torch/_compile.py and the optimizers (`disable`, `graph_break`), DDP's constructor
    # (`get_optimize_ddp_mode`), `init_process_group` (`clear_lru_cache`), models (`is_compiling`). A version of PyTorch that
    # asks for more gets the package itself, as it would without the stand-in.
    modes = StandIn(f"{DYNAMO}.utils", {"get_optimize_ddp_mode": lambda: "ddp_optimizer"})  # the default
    rules = StandIn(f"{DYNAMO}.trace_rules", {"clear_lru_cache": lambda: None})
    answers = {"graph_break": _graph_break, "is_compiling": torch.compiler.is_compiling, "disable": _disable}
    install_stand_in(StandIn(DYNAMO, {**answers, "utils": modes, "trace_rules": rules}))


class StandIn(ModuleType):
    """Stands in for a package inside another one, or for a module in it, until it is asked for what it has no answer to."""

    def __init__(self, name: str, answers: Mapping[str, object]) -> None:
        super().__init__(name)
        self._answers = answers

    # Composition cannot do it: `import` takes any object, and asks it for attributes.
    def __getattr__(self, name: str) -> Any:
        # Code that goes through all modules (`inspect`, `warnings`) asks each for names like `__file__`, and does not mean this
        # one. But an import of a module in the package begins with the package's `__path__`.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        package = ".".join(self.__name__.split(".")[:2])
        if isinstance(sys.modules.get(package), StandIn):
            if name in self._answers:
                return self._answers[name]
            _import_real_package(package, asked=self.__name__ if name == "__path__" else f"{self.__name__}.{name}")
        # From here on, this is only for who has kept the stand-in (`import torch._dynamo as dynamo`).
        return getattr(importlib.import_module(self.__name__), name)


class _LoadedModuleFinder:
    """Finds a module of the package that the package's own import has just loaded, so that it does not run a second time."""

    # `import torch._dynamo.config` sees that this module is not loaded, reads the package's `__path__`, and then looks for the
    # module. Where a stand-in has the package's place, reading `__path__` imports the package, and the package imports
    # this module. Python 3.11 does not look again, and would make a second module that the package itself does not use.
    # https://docs.python.org/3/reference/import.html#path-attributes-on-modules

    def __init__(self, package: str) -> None:
        self._below = f"{package}."

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,  # noqa: ARG002  importlib passes it
        target: ModuleType | None = None,
    ) -> Any:
        module = sys.modules.get(name) if name.startswith(self._below) and target is None else None
        found = getattr(module, "__spec__", None)
        if module is None or found is None or getattr(found, "_initializing", False):
            return None
        return ModuleSpec(name, self, origin=found.origin, loader_state=found)  # type: ignore[arg-type]  # a loader by its methods

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        if isinstance(found := getattr(module.__spec__, "loader_state", None), ModuleSpec):
            module.__spec__ = found  # importlib has put its own there


def install_stand_in(stand_in: StandIn) -> None:
    """Have imports find the stand-in, and each module of its package once."""
    parent, _, name = stand_in.__name__.rpartition(".")
    # Asked for: is it installed?
    stand_in.__spec__ = PathFinder.find_spec(stand_in.__name__, sys.modules[parent].__path__)
    sys.meta_path.insert(0, _LoadedModuleFinder(stand_in.__name__))
    sys.modules[stand_in.__name__] = stand_in
    setattr(sys.modules[parent], name, stand_in)


_removal_lock = threading.Lock()


def _import_real_package(package: str, *, asked: str) -> None:
    """Take the stand-in away and import the package."""
    parent, _, name = package.rpartition(".")
    with _removal_lock:  # of two threads, the second must not take away what the first is importing
        if isinstance(sys.modules.get(package), StandIn):
            log.info(
                "importing %s, which takes some seconds, because `%s` is used. `import %s` at the top of the script, or of the "
                "recipe's module, would do it once for all workers of a node",
                package,
                asked,
                package,
            )
            # The attribute too: the package's own modules look each other up through it while they are imported.
            vars(sys.modules[parent]).pop(name, None)
            del sys.modules[package]
    importlib.import_module(package)


def _dynamo_function(name: str) -> Any:
    """Return a function of dynamo; None where it has not been imported, or not as far as that."""
    dynamo = sys.modules.get(DYNAMO)
    return None if dynamo is None or isinstance(dynamo, StandIn) else vars(dynamo).get(name)


def _graph_break(msg: str = "") -> None:
    """Do nothing, because no graph is recorded; but a model that kept this function may be compiled later."""
    graph_break = _dynamo_function("graph_break")
    if graph_break is not None:
        graph_break(msg)


def _disable(function: Any = None, recursive: bool = True, **options: Any) -> Any:  # noqa: FBT002  as dynamo's own
    """Return a function that calls `function`; once dynamo is there, as dynamo's own `disable` has it called."""
    if not inspect.isfunction(function):  # a class, a module, or nothing, for a decorator: rare
        _import_real_package(DYNAMO, asked=f"{DYNAMO}.disable")
        return sys.modules[DYNAMO].disable(function, recursive, **options)
    plain: Callable[..., Any] = function
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not disabled:
            disable = _dynamo_function("disable")
            if disable is None:
                return plain(*args, **kwargs)
            disabled.append(disable(plain, recursive, **options))
        return disabled[0](*args, **kwargs)

    return call
