"""One module gives workers their variables; this reads the source and says who else writes one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from ddp_hpc.cluster.rendezvous.worker_env import ENDPOINT, RANKS, TABLE_VARIABLE, Sourced, node_variables
from tests.architecture.test_doors import PACKAGE, ROOMS

NOTHING = Sourced(rule="")
VARIABLES = frozenset({*RANKS, *ENDPOINT, TABLE_VARIABLE, *node_variables(NOTHING, NOTHING)})
"""PYTHONPATH is none of these: it is settled where a Python is started, in an image and out of one."""
WRITER = "cluster/rendezvous/worker_env.py"
SETTERS = {"setdefault", "putenv", "setenv", "update", "dict", "pop", "unsetenv"}
_ASSIGNED = re.compile(r"(?:^|\s|--(?:export|env)=)([A-Z][A-Z0-9_]*)=")


def writes(source: str) -> set[str]:
    """Return the worker variables that this source text sets, removes, or puts into a mapping or a command."""
    if not any(name in source for name in VARIABLES):
        return set()  # most modules, without parsing them
    return {name for node in ast.walk(ast.parse(source)) for name in written_by(node) if name in VARIABLES}


def written_by(node: ast.AST) -> Iterator[str]:
    """Yield the names that this one node may give a value."""
    match node:
        case ast.Dict(keys=keys):
            yield from (key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))
        case ast.Subscript(slice=ast.Constant(value=str(name)), ctx=ast.Store() | ast.Del()):
            yield name
        case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=arguments, keywords=keywords):
            if called in SETTERS:
                yield from (word.arg for word in keywords if word.arg is not None)
                yield from (
                    one.value for one in arguments if isinstance(one, ast.Constant) and isinstance(one.value, str)
                )
        case ast.Constant(value=str(text)):
            yield from _ASSIGNED.findall(text)


def test_no_other_module_writes_a_variable_of_workers() -> None:
    written = {room: writes((PACKAGE / room).read_text(encoding="utf-8")) for room in ROOMS if room != WRITER}

    found = {room: names for room, names in written.items() if names}
    assert found == {}, f"`{WRITER}` alone gives workers their variables"


def test_no_shell_template_writes_a_variable_of_workers() -> None:
    templates = [*PACKAGE.parent.glob("sbatch_templates/*"), *PACKAGE.glob("sbatch_templates/*")]

    assert templates
    assert {name for path in templates for name in _ASSIGNED.findall(path.read_text())} & VARIABLES == set()


def test_the_one_module_writes_them() -> None:
    source = (PACKAGE / WRITER).read_text(encoding="utf-8")

    assert {"NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG", "RES_OPTIONS"} <= writes(source)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("MASTER_ADDR", "import os\nos.environ['MASTER_ADDR'] = 'node1'"),
        ("RANK", "x = {'RANK': '0', **y}"),
        ("RES_OPTIONS", "def f(environ):\n    environ.setdefault('RES_OPTIONS', 'timeout:1')"),
        ("OMP_NUM_THREADS", "environ.update(OMP_NUM_THREADS='1')"),
        ("WORLD_SIZE", "x = dict(WORLD_SIZE='1')"),
        ("NODE_RANK", "del environ['NODE_RANK']"),
        ("LOCAL_RANK", "environ.pop('LOCAL_RANK', None)"),
        ("NCCL_SOCKET_IFNAME", "argv = ['env', f'NCCL_SOCKET_IFNAME={name}']"),
        ("GLOO_SOCKET_IFNAME", "argv = ['srun', '--export=GLOO_SOCKET_IFNAME=lo']"),
        ("CUBLAS_WORKSPACE_CONFIG", "'export CUBLAS_WORKSPACE_CONFIG=:4096:8'"),
    ],
)
def test_the_guard_sees_each_way_to_write_one(name: str, source: str) -> None:
    """A guard that cannot fail guards nothing."""
    assert writes(source) == {name}


@pytest.mark.parametrize(
    "source",
    [
        "rank = int(os.environ['RANK'])",
        "given = environ.get('MASTER_ADDR')",
        "names = ('RANK', 'WORLD_SIZE')",
        "'''Set MASTER_ADDR to an IP address.'''",
        "x = {'HOME': '/root'}",
    ],
)
def test_the_guard_lets_readers_pass(source: str) -> None:
    assert writes(source) == set()
