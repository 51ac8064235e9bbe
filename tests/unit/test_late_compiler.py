"""The stand-in for `torch._dynamo`: workers train without the package, and whatever needs it gets it."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ddp_hpc.train.late_compiler import StandIn, install_stand_in

LINES = """
import sys
import torch, torch.distributed as dist
from ddp_hpc.train.late_compiler import StandIn, import_compiler_late

import_compiler_late()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Flatten(), torch.nn.Linear(8, 1))
ddp = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

def step(run, optimizer, images=torch.ones(2, 1, 4, 4)):
    run(images).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad):
    optimizer = kind(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step(ddp, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
plain_add = torch.compiler.disable(lambda one, other: one + other)
assert plain_add(1, 2) == 3
assert isinstance(sys.modules["torch._dynamo"], StandIn), "an eager training has imported the compiler"
assert "sympy" not in sys.modules

graphs = []
def count(graph, _inputs):
    graphs.append(graph)
    return graph.forward

compiled = torch.compile(model, backend=count)
step(compiled, optimizer)
optimizer.step()
assert type(sys.modules["torch._dynamo"]) is type(sys), "torch.compile has not imported the compiler"
assert torch._dynamo is sys.modules["torch._dynamo"]
assert len(graphs) == 1
both = torch.compile(lambda one: plain_add(one.sin(), 1).cos(), backend=count)
both(torch.ones(2))
assert len(graphs) == 3, "a function that was disabled before the import is traced after it"
"""


@pytest.mark.long
@pytest.mark.skipif(torch.__version__ < "2.7", reason="DDP of PyTorch 2.6 imports the compiler in any case")
def test_an_eager_training_leaves_the_compiler_out_and_torch_compile_brings_it_in() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LINES], capture_output=True, text=True, check=False, timeout=300
    )

    assert done.returncode == 0, done.stderr


FIRST_TOUCH = """
import sys
import torch
from ddp_hpc.train.late_compiler import import_compiler_late

import_compiler_late()
{line}
import torch._dynamo.output_graph
assert torch._dynamo.output_graph.config is torch._dynamo.config is sys.modules["torch._dynamo.config"]
of_dynamo = {{name: module for name, module in sys.modules.items() if name.startswith("torch._dynamo.")}}
for name, module in of_dynamo.items():
    parent, _, child = name.rpartition(".")
    seen = vars(sys.modules[parent]).get(child, module)
    assert seen is module or not isinstance(seen, type(sys)), f"two copies of {{name}}"
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "line",
    [
        "from torch._dynamo.decorators import mark_dynamic",
        pytest.param(
            "import torch._dynamo.config; torch._dynamo.config.suppress_errors = True", marks=pytest.mark.long
        ),
        pytest.param("import torchvision", marks=pytest.mark.long),
    ],
)
def test_a_module_of_the_compiler_that_is_asked_for_first_is_made_once(line: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FIRST_TOUCH.format(line=line)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )

    assert done.returncode == 0, done.stderr


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A stand-in for `outer.slow`, whose import takes a while, and whose modules look for each other as they are imported."""
    slow = tmp_path / "outer" / "slow"
    slow.mkdir(parents=True)
    (slow.parent / "__init__.py").touch()
    (slow / "__init__.py").write_text(
        "import time\ntime.sleep(0.2)\nimport outer\nfrom outer.slow import inner\nvalue = inner.value\nmode = lambda: 'real'\n"
    )
    (slow / "inner.py").write_text("value = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    importlib.import_module("outer")
    stand_in = StandIn("outer.slow", {"mode": lambda: "known"})
    install_stand_in(stand_in)
    yield stand_in
    for name in [name for name in sys.modules if name.partition(".")[0] == "outer"]:
        del sys.modules[name]


def test_a_stand_in_answers_what_it_knows_and_imports_nothing(package: StandIn) -> None:
    found = importlib.import_module("outer.slow")

    assert found is package
    assert found.mode() == "known"
    assert not hasattr(found, "__file__")
    assert sys.modules["outer.slow"] is package


@pytest.mark.parametrize(
    "line",
    [
        "import outer.slow.inner as inner; assert inner.value == 7",
        "from outer.slow import value; assert value == 7",
        "from outer.slow.inner import value; assert value == 7",
        "import outer; assert outer.slow.value == 7; assert outer.slow.mode() == 'real'",
        "import outer.slow as kept; assert kept.value == 7; assert kept.mode() == 'real'; assert kept.inner.value == 7",
    ],
)
def test_any_other_use_imports_the_package_in_its_place(package: StandIn, line: str) -> None:
    exec(line, {})  # noqa: S102  the forms of `import` are what is tested

    assert sys.modules["outer.slow"] is not package
    assert sys.modules["outer"].slow is sys.modules["outer.slow"]
    assert sys.modules["outer.slow"].inner is sys.modules["outer.slow.inner"], "two copies of one module"
    assert sys.modules["outer.slow.inner"].__spec__ is not None


def test_who_asks_whether_the_package_is_installed_hears_so(package: StandIn) -> None:
    found = importlib.util.find_spec("outer.slow")

    assert found is not None
    assert found.origin is not None
    assert found.origin.endswith("__init__.py")
    assert sys.modules["outer.slow"] is package


def test_threads_that_use_the_package_at_the_same_time_import_it_once(package: StandIn) -> None:
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(package.value)) for _ in range(4)]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found == [7] * 4


def test_a_package_that_cannot_be_imported_raises_its_own_error_each_time(package: StandIn, tmp_path: Path) -> None:
    (tmp_path / "outer" / "slow" / "__init__.py").write_text("raise OSError('no such library')\n")

    for _ in range(2):
        with pytest.raises(OSError, match="no such library"):
            _ = package.value
