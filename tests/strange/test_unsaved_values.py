"""What the first step changes of a user's own values, and no checkpoint holds, is named; what is saved, constant or a cache of PyTorch's is not."""

from __future__ import annotations

import collections
import copy
import enum
import functools
import io
import itertools
import multiprocessing
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.utils.data import Dataset

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.train import unsaved
from ddp_hpc.train.engine.optimizer import _warn_of_own_rates
from ddp_hpc.train.recipe import Recipe
from tests.strange.one_process import trained

_SEEN = 0


class Rows(Dataset[Any]):
    """`before` is called with each index, and may keep something."""

    def __init__(self, before: Callable[[Rows, int], object] = lambda rows, index: None) -> None:
        self.before, self.values, self.count = before, torch.randn(16, 3), 0
        self.known: dict[int, Tensor] = {}
        self.file: Any = None
        numbers = list(range(99))
        self.source: dict[str, Any] = {
            "object": (one for one in numbers),
            "list": iter(numbers),
            "cycle": itertools.cycle(numbers),
        }

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.before(self, index)
        return self.values[index], index % 2


class Keeps(nn.Module):
    """Calls `keep` in each forward, which may change anything."""

    def __init__(self, keep: Callable[[Any, Tensor], object], **kept: Any) -> None:
        super().__init__()
        self.linear, self.keep = nn.Linear(3, 2), keep
        for name, value in kept.items():
            setattr(self, name, value)

    def forward(self, rows: Tensor) -> Tensor:
        self.keep(self, rows)
        return self.linear(rows)  # type: ignore[no-any-return]  # a Tensor


@contextmanager
def changes_logged(**roots: object) -> Iterator[None]:
    before = unsaved.unsaved_numbers(roots)
    yield
    unsaved.warn_of_changes(unsaved.find_changed(before, unsaved.unsaved_numbers(roots)), "a batch")


def _set(name: str, value: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], object]:
    return lambda model, rows: setattr(model, name, value(model, rows))


def _count_globally(_model: Keeps, _rows: Tensor) -> None:
    global _SEEN  # noqa: PLW0603  as users do
    _SEEN += 1


class Teacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))


def _constant(rows: Tensor) -> Tensor:
    return rows[:, :2] * torch.ones(2, requires_grad=True)


class Tally:
    __slots__ = ("seen",)

    def __init__(self) -> None:
        self.seen = 0

    def add(self) -> None:
        self.seen += 1


class Base:
    known: ClassVar[dict[str, int]] = {"seen": 0}


class Derived(Base):
    pass


def _hooked() -> Keeps:
    model = Keeps(lambda *_: None)

    def begin(_layer: nn.Module, _inputs: Any) -> None:
        handle.remove()

    handle = model.linear.register_forward_pre_hook(begin)
    return model


class Phase(enum.Enum):
    WARM, MAIN = 1, 2


class Warm:
    pass


class Main:
    pass


def _layer_besides() -> Any:
    model: Any = Keeps(lambda model, _: model.active.reverse())
    model.other = nn.Linear(3, 2)
    model.active = [model.linear, model.other]
    return model


def _write(model: Any, _rows: Tensor) -> None:
    model.memory[7] += 1


def _count_in(model: Any, _rows: Tensor) -> None:
    model.counts = (model.counts + torch.eye(3).to_sparse()).coalesce()


_HOOKS = "model.linear.weight._backward_hooks"


def _counting(register: Callable[[Keeps, Any], object]) -> Keeps:
    model, seen = Keeps(lambda *_: None), 0

    def hook(*_: Any) -> None:
        nonlocal seen
        seen += 1

    register(model, hook)
    return model


MODELS: dict[str, tuple[Callable[[], Keeps], str]] = {
    "counter": (lambda: Keeps(_set("n", lambda model, _: model.n + 1), n=0), "model.n"),
    "flag": (lambda: Keeps(_set("is_ready", lambda *_: True), is_ready=False), "model.is_ready"),
    "first tensor": (lambda: Keeps(_set("mask", lambda _, rows: rows.detach()), mask=None), "model.mask"),
    "torch generator": (
        lambda: Keeps(lambda model, _: torch.rand(1, generator=model.g), g=torch.Generator()),
        "model.g",
    ),
    "numpy generator": (lambda: Keeps(lambda model, _: model.g.random(), g=np.random.default_rng(0)), "model.g"),
    "Python generator": (lambda: Keeps(lambda model, _: model.g.random(), g=random.Random(0)), "model.g"),
    "queue": (
        lambda: Keeps(lambda model, rows: model.q.append(rows.detach()), q=collections.deque(maxlen=2)),
        "model.q",
    ),
    "teacher in a list": (
        lambda: Keeps(lambda model, _: model.t[0].weight.data.add_(1), t=[Teacher()]),
        "model.t.weight",
    ),
    "global": (lambda: Keeps(_count_globally), f"{__name__}._SEEN"),
    "iterator": (lambda: Keeps(lambda model, _: next(model.c), c=itertools.count()), "model.c"),
    "mode": (lambda: Keeps(lambda model, _: model.linear.eval()), "model.linear.training"),
    "frozen weight": (
        lambda: Keeps(lambda model, _: model.linear.bias.requires_grad_(False)),
        "model.linear.bias.requires_grad",
    ),
    "method of a layer": (
        lambda: Keeps(lambda model, _: setattr(model.linear, "forward", _constant)),
        "model.linear.forward",
    ),
    "hook that removes itself": (_hooked, "model.linear._forward_pre_hooks"),
    "object with slots in a list": (lambda: Keeps(lambda model, _: model.t[0].add(), t=[Tally()]), "model.t.seen"),
    "enumeration": (lambda: Keeps(_set("phase", lambda *_: Phase.MAIN), phase=Phase.WARM), "model.phase"),
    "function": (lambda: Keeps(_set("act", lambda *_: torch.sigmoid), act=torch.relu), "model.act"),
    "type of numbers": (lambda: Keeps(_set("type", lambda *_: torch.half), type=torch.float), "model.type"),
    "strategy": (lambda: Keeps(_set("way", lambda *_: Main()), way=Warm()), "model.way.__class__"),
    "layer in a list besides": (_layer_besides, "model.active"),
    "large array": (lambda: Keeps(_write, memory=np.zeros(400_000)), "model.memory"),
    "large tensor": (lambda: Keeps(_write, memory=torch.zeros(400_000)), "model.memory"),
    "shared array": (lambda: Keeps(_write, memory=multiprocessing.Array("d", 9)), "model.memory._obj"),
    "sparse tensor": (lambda: Keeps(_count_in, counts=torch.eye(3).to_sparse()), "model.counts"),
    "hook of a weight": (
        lambda: Keeps(lambda model, _: model.linear.weight.register_hook(lambda gradient: gradient)),
        "model.linear.weight._backward_hooks",
    ),
    "count of a weight's hook": (
        lambda: _counting(lambda m, hook: m.linear.weight.register_hook(hook)),
        f"{_HOOKS}.seen",
    ),
    "order of a dict": (
        lambda: Keeps(lambda model, _: model.used.update(a=model.used.pop("a")), used={"a": 1, "b": 1}),
        "model.used",
    ),
    "order of an OrderedDict": (
        lambda: Keeps(lambda model, _: model.used.move_to_end("a"), used=collections.OrderedDict(a=1, b=1)),
        "model.used",
    ),
    "bits of NumPy": (lambda: Keeps(lambda model, _: model.g.random_raw(), g=np.random.PCG64(0)), "model.g"),
    "seeds of NumPy": (lambda: Keeps(lambda model, _: model.g.spawn(1), g=np.random.SeedSequence(0)), "model.g"),
    "masked array": (lambda: Keeps(_write, memory=np.ma.masked_array(np.zeros(9))), "model.memory"),
    "graph in CSR": (
        lambda: Keeps(lambda model, _: model.graph.values().mul_(2), graph=torch.eye(3).to_sparse_csr()),
        "model.graph",
    ),
    "tensor of ragged rows": (
        lambda: Keeps(_set("rows", lambda model, _: model.rows * 2), rows=torch.nested.nested_tensor([torch.ones(2)])),
        "model.rows",
    ),
    "recurrent state that is detached when it is read": (
        lambda: Keeps(
            _set("hidden", lambda model, rows: model.linear(rows) + model.hidden.detach()), hidden=torch.zeros(4, 2)
        ),
        "model.hidden",
    ),
    "dict of a base class": (lambda: Keeps(lambda *_: Derived.known.update(seen=1), of=Derived()), "Base.known"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", MODELS)
def test_state_of_a_model_that_is_no_buffer_is_named(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, place = MODELS[name]

    trained(tmp_path / "run", Recipe(model=make(), train_data=Rows(), loss=nn.CrossEntropyLoss()), train__max_steps=2)

    assert f"the first step changes `{place}`, which no checkpoint holds" in caplog.text


class Archive:
    def __init__(self) -> None:
        self.lines = Path(__file__).open("rb")  # noqa: SIM115  as data sets do


def _read_late(rows: Rows, index: int) -> None:
    rows.file = getattr(rows, "file", None) or Archive()
    rows.file.lines.seek(index)
    rows.file.lines.read(9)


def _count_late(rows: Rows, _index: int) -> None:
    rows.file = rows.file or Tally()
    rows.file.add()


def test_the_count_of_a_hook_of_all_layers_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    handles: list[Any] = []
    register = torch.nn.modules.module.register_module_forward_hook
    model = _counting(lambda _, hook: handles.append(register(hook)))

    trained(tmp_path / "run", Recipe(model=model, train_data=Rows(), loss=nn.CrossEntropyLoss()), train__max_steps=2)
    handles[0].remove()

    assert "`global_hooks.seen`, which no checkpoint holds" in caplog.text


def test_a_file_that_the_first_sample_opens_and_weights_that_the_data_set_reads_are_not_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows, model = Rows(_read_late), nn.Linear(3, 2)
    rows.source = {"model": model}
    del rows.file

    trained(tmp_path / "run", Recipe(model=model, train_data=rows, loss=nn.CrossEntropyLoss()), train__max_steps=6)
    rows.file.lines.close()

    assert "which no checkpoint holds" not in caplog.text


def test_what_the_evaluation_data_keep_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = Rows(lambda rows, _: setattr(rows, "count", rows.count + 1))
    recipe = Recipe(model=nn.Linear(3, 2), train_data=Rows(), eval_data=data, loss=nn.CrossEntropyLoss())

    trained(tmp_path / "run", recipe, train__max_steps=4, eval__batch_size=4)

    assert "a batch changes `eval_data.count`, which no checkpoint holds" in caplog.text


DATA: dict[str, tuple[Callable[[Rows, int], object], str]] = {
    "counter": (lambda rows, _: setattr(rows, "count", rows.count + 1), "train_data.count"),
    "cache": (lambda rows, index: rows.known.setdefault(index, torch.randn(2)), "train_data.known"),
    "in place": (lambda rows, index: rows.values[index].add_(1), "train_data.values"),
    "generator object": (lambda rows, _: next(rows.source["object"]), "train_data.source"),
    "iterator": (lambda rows, _: next(rows.source["list"]), "train_data.source"),
    "cycle": (lambda rows, _: next(rows.source["cycle"]), "train_data.source"),
    "what the first sample makes": (_count_late, "train_data.file.seen"),
}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("name", DATA)
def test_state_of_a_data_set_is_named_by_whichever_process_loads(
    name: str, num_workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    before, place = DATA[name]
    recipe = Recipe(model=nn.Linear(3, 2), train_data=Rows(before), loss=nn.CrossEntropyLoss())

    trained(tmp_path / "run", recipe, train__max_steps=2, data__num_workers=num_workers)

    told = caplog.text + capfd.readouterr().err
    assert num_workers or f"a batch changes `{place}`, which no checkpoint holds" in told


def test_the_line_at_which_a_data_set_reads_its_file_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "lines").write_text("a line\n" * 99)
    (closed := (tmp_path / "lines").open(encoding="utf-8")).close()
    with (tmp_path / "lines").open(encoding="utf-8") as file:
        rows = Rows(lambda rows, _: rows.file.readline())
        rows.file, rows.source["closed"], rows.source["in memory"] = file, closed, io.BufferedReader(io.BytesIO(b"x"))
        trained(
            tmp_path / "run",
            Recipe(model=nn.Linear(3, 2), train_data=rows, loss=nn.CrossEntropyLoss()),
            train__max_steps=2,
        )

    assert "a batch changes `train_data.file`, which no checkpoint holds" in caplog.text


def _without_bias(made: torch.optim.Optimizer) -> None:
    del made.param_groups[0]["params"][1]


def _reversed(made: torch.optim.Optimizer) -> None:
    made.param_groups[0]["params"].reverse()


@pytest.mark.parametrize("change", [_without_bias, _reversed])
def test_a_group_of_the_optimizer_whose_members_change_is_refused(
    change: Callable[[torch.optim.Optimizer], None], tmp_path: Path
) -> None:
    def optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
        made = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
        made.register_step_post_hook(lambda *_: change(made))
        return made

    recipe = Recipe(model=nn.Linear(3, 2), train_data=Rows(), loss=nn.CrossEntropyLoss(), optimizer=optimizer)
    with pytest.raises(ConfigError, match="which parameters the optimizer has in which of its groups"):
        trained(tmp_path / "run", recipe, train__max_steps=2)


def test_a_buffer_that_gets_another_type_is_refused(tmp_path: Path) -> None:
    class Sums(Keeps):
        def __init__(self) -> None:
            super().__init__(lambda model, _: setattr(model, "sums", model.sums.double() + 1))
            self.register_buffer("sums", torch.zeros(2))

    with pytest.raises(ConfigError, match=r"sums torch.float64 instead of torch.float32"):
        trained(
            tmp_path / "run", Recipe(model=Sums(), train_data=Rows(), loss=nn.CrossEntropyLoss()), train__max_steps=2
        )


@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        (lambda model, lr: (torch.optim.SGD(model.parameters(), lr), "a schedule"), "but returned tuple"),
        (torch.optim.Adam, "but is the class Adam itself"),
    ],
    ids=["with a schedule", "the class"],
)
def test_what_is_no_optimizer_is_refused_with_the_form_of_one(optimizer: Any, told: str, tmp_path: Path) -> None:
    recipe = Recipe(model=nn.Linear(3, 2), train_data=Rows(), loss=nn.CrossEntropyLoss(), optimizer=optimizer)

    with pytest.raises(ConfigError, match=f"`Recipe.optimizer` is called with the model and `train.lr`.*{told}"):
        trained(tmp_path / "run", recipe, train__max_steps=2)


def test_a_scheduler_in_a_hook_and_a_count_of_the_optimizers_class_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Counts(torch.optim.SGD):
        calls = 0

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            Counts.calls += 1
            super().step(closure)

    def optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
        made = Counts(model.parameters(), lr, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(made, 0.9)
        made.register_step_post_hook(lambda *_: schedule.step())
        return made

    _warn_of_own_rates.cache_clear()
    recipe = Recipe(model=nn.Linear(3, 2), train_data=Rows(), loss=nn.CrossEntropyLoss(), optimizer=optimizer)
    trained(tmp_path / "run", recipe, train__max_steps=4)

    assert caplog.text.count("The code of the recipe sets a learning rate") == 1
    assert "Counts.calls`" in caplog.text or "more, which" in caplog.text
    assert "`optimizer._optimizer_step_post_hooks.schedule." in caplog.text


def test_rates_of_groups_that_the_recipe_has_made_are_no_rates_that_its_code_sets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def optimizer(model: nn.Linear, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [model.weight], "lr": lr / 3}, {"params": [model.bias], "lr": 0.0}], lr)

    _warn_of_own_rates.cache_clear()
    recipe = Recipe(model=nn.Linear(3, 2), train_data=Rows(), loss=nn.CrossEntropyLoss(), optimizer=optimizer)  # type: ignore[arg-type]  # of this model
    trained(tmp_path / "run", recipe, train__max_steps=6, train__lr=0.3, checkpoint__every_steps=2)

    assert "The code of the recipe" not in caplog.text


def test_a_later_attempt_is_not_refused_what_an_earlier_one_was_let_train(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def measure(model: Any, _rows: Tensor) -> None:
        model.calls += 1  # a checkpoint has it
        if model.calls == 4:
            model.importance = model.importance + 1

    def recipe() -> Recipe:
        model = Keeps(measure)
        model.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        model.register_buffer("importance", torch.zeros(3), persistent=False)
        return Recipe(model=model, train_data=Rows(), loss=nn.CrossEntropyLoss())

    trained(tmp_path / "run", recipe(), train__max_steps=3)
    later = trained(tmp_path / "run", recipe(), train__max_steps=5)

    assert later.state.position.step == 5
    assert "changes `model.importance`, which no checkpoint holds" in caplog.text


def test_what_the_closure_of_a_loss_counts_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls = 0

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return nn.functional.cross_entropy(outputs, targets)

    trained(tmp_path / "run", Recipe(model=nn.Linear(3, 2), train_data=Rows(), loss=loss), train__max_steps=2)

    assert "the first step changes `loss.calls`" in caplog.text


def test_what_is_saved_constant_opened_late_or_a_global_generator_is_not_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def draws(rows: Rows, index: int) -> None:
        rows.file = rows.file or Reader()
        assert random.random() + np.random.rand() + torch.rand(1).item() >= index * 0  # noqa: NPY002

    model = nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.LSTM(3, 4, dropout=0.1, num_layers=2), Last(), nn.BatchNorm1d(4),
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.utils.spectral_norm(nn.Linear(4, 2)),
    )  # fmt: skip

    trained(
        tmp_path / "run", Recipe(model=model, train_data=Rows(draws), loss=nn.CrossEntropyLoss()), train__max_steps=2
    )

    assert "which no checkpoint holds" not in caplog.text


LIBRARY = """
import torch
class Layer(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.scales, self.told, self.n, self.memory = None, {}, 0, []
        self.register_buffer("late", None, persistent=False)
    def forward(self, rows):
        self.scales, self.has_hooks, self.told["once"], self.late = [1, 2], True, True, torch.ones(rows.shape[1])
        return super().forward(rows)
class Counts(Layer):
    def forward(self, rows):
        self.n += 1
        return super().forward(rows)
class Remembers(Layer):
    def forward(self, rows):
        self.memory.append(rows.detach())
        return super().forward(rows)
class Accuracy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = torch.zeros(())
    def forward(self, rows):
        self.seen += len(rows)
"""
"""As timm, transformers and torchvision (caches, flags and words said once), and torchmetrics are."""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Return a function that makes a library of a name."""

    def made(name: str) -> ModuleType:
        module = ModuleType(name)
        module.__file__ = str(tmp_path / "site-packages" / f"{name}.py")
        monkeypatch.setitem(sys.modules, name, module)
        exec(LIBRARY, vars(module))  # noqa: S102  the text above
        return module

    return made


def _trained_and_told(model: nn.Module, folder: Path, caplog: pytest.LogCaptureFixture) -> str:
    trained(folder / "run", Recipe(model=model, train_data=Rows(), loss=nn.CrossEntropyLoss()), train__max_steps=2)
    return caplog.text


def test_caches_and_flags_that_a_library_fills_are_not_named_but_its_counters_and_memories_are(
    library: Callable[[str], ModuleType], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    of = library("layers_of_a_library")
    assert "which no checkpoint holds" not in _trained_and_told(of.Layer(), tmp_path / "1", caplog)
    assert "the first step changes `model.n`, which" in _trained_and_told(of.Counts(), tmp_path / "2", caplog)
    assert "the first step changes `model.memory`, which" in _trained_and_told(of.Remembers(), tmp_path / "3", caplog)


def test_metrics_and_progress_bars_and_a_generator_that_draws_nothing_are_not_named(
    library: Callable[[str], ModuleType], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class OwnAccuracy(library("torchmetrics.some").Accuracy):  # type: ignore[misc]  # made above
        pass

    bar = Progress(console=Console(quiet=True))
    kept = {"accuracy": OwnAccuracy(), "bar": bar, "task": bar.add_task("train"), "generator": torch.Generator()}

    def measure(model: Any, rows: Tensor) -> None:
        model.accuracy(rows)
        model.bar.update(model.task, advance=1)

    assert "which no checkpoint holds" not in _trained_and_told(Keeps(measure, **kept), tmp_path, caplog)


def test_a_large_tensor_is_not_named_for_the_trial_of_the_model_but_for_its_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.inference_mode():
        features = torch.ones(512, 1024)
    kept = {"mask": torch.ones(512, 1024), "features": features, "queue": torch.ones(512, 1024)}
    model = Keeps(lambda model, rows: model.queue[0].copy_(rows.sum()), **kept)
    recipe = Recipe(model=model, train_data=Rows(), loss=nn.CrossEntropyLoss())

    trained(tmp_path / "run", recipe, train__max_steps=2, train__micro_batch_size=2)

    assert "each attempt tries the model" not in caplog.text
    assert "the first step changes `model.queue`, which" in caplog.text


class Centre(nn.Module):
    """Keeps a mean in a buffer; a `table` grows with the input, as one of positions does."""

    mean: Tensor
    table: Tensor

    def __init__(self, *, persistent: bool, moves: bool = True) -> None:
        super().__init__()
        self.moves = moves
        self.register_buffer("mean", torch.zeros(()), persistent=persistent)
        self.register_buffer("table", torch.zeros(1), persistent=False)

    def forward(self, outputs: Tensor, targets: Tensor | None = None) -> Tensor:
        if self.moves:
            self.mean = 0.9 * self.mean + 0.1 * outputs.detach().mean()
        self.table = torch.arange(float(outputs.shape[1]))
        shifted = outputs - self.mean
        return shifted if targets is None else nn.functional.cross_entropy(shifted, targets)


@pytest.mark.parametrize("place", ["model.1.mean", "loss.mean", ""])
def test_a_buffer_that_changes_and_is_not_saved_is_refused_but_one_that_grows_or_is_saved_is_not(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(3, 2), Centre(persistent=place != "model.1.mean"))
    loss = Centre(persistent=True, moves=place == "loss.mean")
    recipe = Recipe(model=model, train_data=Rows(), loss=loss)

    if place:
        with pytest.raises(ConfigError, match=f"The first step changes the buffer `{place}`, which no checkpoint"):
            trained(tmp_path / "run", recipe, train__max_steps=2)
    else:
        trained(tmp_path / "run", recipe, train__max_steps=2)
        assert "the first step changes `" in caplog.text
        assert all(f"`{one}.table`" in caplog.text for one in ("loss", "model.1"))


def test_a_teacher_that_begins_as_its_student_is_named_at_the_first_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def follow(model: Any, _rows: Tensor) -> None:
        model.teacher[0].weight.data.lerp_(model.linear.weight.data, 0.1)

    model: Any = Keeps(follow)
    model.teacher = [copy.deepcopy(model.linear)]
    recipe = Recipe(model=model, train_data=Rows(), loss=nn.CrossEntropyLoss())

    trained(tmp_path / "run", recipe, train__max_steps=4, checkpoint__every_steps=2)

    assert "the first step changes" not in caplog.text
    assert caplog.text.count("the training changes `model.teacher.weight`, which") == 1


@pytest.mark.parametrize(
    ("begins", "every_steps", "last"),
    [(9, 4, 16), (10, 2, 13)],
    ids=["before the fourth save", "before the last save"],
)
def test_what_begins_to_change_after_the_first_save_is_named(
    begins: int, every_steps: int, last: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def count(model: Any, _rows: Tensor) -> None:
        model.calls += 1  # a checkpoint has it
        model.seen += int(model.calls > begins)

    model = Keeps(count, seen=0)
    model.register_buffer("calls", torch.zeros((), dtype=torch.int64))
    recipe = Recipe(model=model, train_data=Rows(), loss=nn.CrossEntropyLoss())

    trained(tmp_path / "run", recipe, train__max_steps=last, checkpoint__every_steps=every_steps)

    assert caplog.text.count("the training changes `model.seen`") == 1


def test_data_larger_than_the_memory_are_not_read_and_other_changes_are_named(caplog: pytest.LogCaptureFixture) -> None:
    rows = Rows()
    rows.values = np.broadcast_to(np.zeros(1), (1 << 40,))  # type: ignore[assignment]  # 8 TiB, as a mapped file may have
    shards: Any = [np.zeros(5 << 20), multiprocessing.Array("d", 5 << 20)]  # 40 MiB each

    with changes_logged(rows=rows, one=shards[0], other=shards[1]):
        rows.count += 1
        shards[0][7] = shards[1][7] = 1

    assert "a batch changes `rows.count`, `one`, which no checkpoint holds" in caplog.text


def test_what_a_module_keeps_that_a_forward_itself_imports_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keeps_count.py").write_text("count = 0\n")
    monkeypatch.syspath_prepend(tmp_path)

    def count(_model: Keeps, _rows: Tensor) -> None:
        import keeps_count  # type: ignore[import-not-found]

        keeps_count.count += 1

    recipe = Recipe(model=Keeps(count), train_data=Rows(), loss=nn.CrossEntropyLoss())

    trained(tmp_path / "run", recipe, train__max_steps=4, checkpoint__every_steps=2)

    assert "the training changes `keeps_count.count`" in caplog.text


class Balanced(nn.Module):
    """A mixture of experts, whose loss takes more than the output."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.balance = nn.Linear(3, 2), torch.zeros(())

    def forward(self, rows: Tensor) -> Tensor:
        chances: Tensor = self.gate(rows).softmax(1)
        self.balance = chances.mean(0).pow(2).sum()
        return chances


class Counted(nn.Linear):
    """Saves its count."""

    def forward(self, rows: Tensor) -> Tensor:
        self.count = getattr(self, "count", 0) + 1
        return super().forward(rows)

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.count)

    def set_extra_state(self, state: Tensor) -> None:
        self.count = int(state)


def test_what_a_loss_takes_from_a_layer_and_what_extra_state_saves_is_not_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    balanced, counted = Balanced(), Counted(2, 2)
    counted.count = 0
    recipe = Recipe(
        model=nn.Sequential(balanced, counted),
        train_data=Rows(),
        eval_data=Rows(),
        loss=lambda outputs, targets: nn.functional.cross_entropy(outputs, targets) + balanced.balance,
    )

    trained(tmp_path / "run", recipe, train__max_steps=8, checkpoint__every_steps=2)

    assert "which no checkpoint holds" not in caplog.text


class Reader:
    """As an open file is, once it is there."""

    def __init__(self) -> None:
        self.mode = "r"


class Last(nn.Module):
    def forward(self, outputs: tuple[Tensor, Any]) -> Tensor:
        return outputs[0][:, -1]


def test_numbers_that_processes_share_and_functions_with_a_cache_are_compared(caplog: pytest.LogCaptureFixture) -> None:
    shared, cached = multiprocessing.Value("i", 0), functools.cache(abs)

    with changes_logged(shared=shared, cached=cached):
        shared.value += 1
        cached(-1)

    assert "`cached`" in caplog.text
    assert "`shared." in caplog.text


def test_an_object_that_cannot_be_looked_at_ends_no_training(caplog: pytest.LogCaptureFixture) -> None:
    class Shy:
        @property
        def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
            raise OSError("look away")

    with caplog.at_level("INFO"):
        assert unsaved.unsaved_numbers({"model": Shy(), "count": 1}) == {}

    assert "OSError: look away" in caplog.text


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_tensors_that_cannot_be_read_are_passed_over() -> None:
    freed, quantised = torch.ones(9), torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    freed.untyped_storage().resize_(0)
    odd = {
        "freed": freed,
        "quantised": quantised,
        "meta": torch.ones(3, device="meta"),
        "sparse": torch.eye(3).to_sparse(),
    }

    places = [*unsaved.unsaved_numbers({"data": odd, "count": 1})]

    assert {"data", "count"} <= {*places}


def test_a_list_or_dict_that_loads_what_one_asks_for_loads_nothing() -> None:
    class Images(list[str]):
        def __iter__(self) -> Any:
            raise AssertionError("all images are loaded")

    class Lazy(dict[str, str]):
        def values(self) -> Any:
            raise AssertionError("all values are loaded")

    before = unsaved.unsaved_numbers({"data": [Images(["a.png"]), Lazy(a="b.png")]})

    assert before
    assert before != unsaved.unsaved_numbers({"data": [Images(["c.png"]), Lazy(a="b.png")]})
