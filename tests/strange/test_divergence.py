"""Losses, gradients and weights that are not finite."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from ddp_hpc.base.durable import read_json_lines
from ddp_hpc.base.errors import DdpHpcError, DivergedError
from ddp_hpc.run.checkpoints import checkpoint_names, checkpoint_store
from ddp_hpc.run.run_dir.differences import read_difference
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.replays import AttemptInputs, write_inputs
from ddp_hpc.run.spec import CheckpointSpec
from ddp_hpc.train.compare_replicas import ReplicaCheck
from ddp_hpc.train.engine import nonfinite
from ddp_hpc.train.engine.loop import train
from ddp_hpc.train.engine.nonfinite import LossWatch
from ddp_hpc.train.engine.optimizer import trained_parameters
from ddp_hpc.train.engine.training import Training
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.recipe import Recipe
from ddp_hpc.train.state import training_state
from ddp_hpc.train.state.checkpoint import Checkpointer
from tests.distributed.processes import in_group
from tests.distributed.whole_runs import Workplace
from tests.strange.one_process import trained
from tests.strange.walks import Case, begin, close
from tests.unit.made_state import make_state

EXPLODING = """
import torch
from torch.utils.data import TensorDataset
from ddp_hpc.train.recipe import Recipe
from ddp_hpc.train.engine.loop import train
from ddp_hpc.train.engine.optimizer import trained_parameters
from ddp_hpc.train.engine.training import Training


def within_a_million(values):
    factors = torch.ones_like(values)
    factors[values.detach().abs() >= 1e6] = float("nan")
    return values * factors


def build():
    rows = torch.arange(64.0).unsqueeze(1) % 4
    loss = lambda outputs, targets: within_a_million(outputs - targets).square().mean()
    return Recipe(model=torch.nn.Linear(1, 1), train_data=TensorDataset(rows, 2 * rows), loss=loss)
"""
CONFIG = """
recipe: {target: 'exploding:build'}
train: {global_batch_size: 8, epochs: 1000, max_steps: 400, lr: 0.5}
optimizer: {momentum: 0.0, weight_decay: 0.0}
checkpoint: {every_steps: 5}
log: {every_steps: 5}
resources: {workers_per_node: 2}
"""


@pytest.mark.long
def test_a_run_that_diverges_fails_once_and_goes_on_from_its_last_finite_checkpoint(tmp_path: Path) -> None:
    """The whole way: two ranks, the supervisor, the ledger, and the same name again with a sane rate."""
    (tmp_path / "exploding.py").write_text(EXPLODING)
    workplace = Workplace(tmp_path)
    workplace.config.write_text(CONFIG)
    run = workplace.run("hot")

    ended = workplace.submit("hot", "--wait")

    assert ended.returncode == 1, ended.stdout + ended.stderr
    (attempt,) = Ledger.read(run).attempts
    assert (attempt.ending, attempt.cause, attempt.next, attempt.failed_nodes) == ("failed", "diverged", "", ())
    steps = checkpoint_names.committed_steps(run)
    assert steps
    told = f"it goes on from step {steps[-1]}, its newest checkpoint;"
    assert all(text in ended.stderr for text in ("The training has diverged", "`train.lr`", told, "`--fresh`"))
    assert "Traceback" not in ended.stderr
    assert all(_is_finite(run, step) for step in steps)

    again = workplace.submit("hot", "--wait", "train.lr=0.01", "train.max_steps=100")

    assert again.returncode == 0, again.stdout + again.stderr
    losses = [line["loss"] for line in read_json_lines(run.metrics)]
    assert losses[-1] is not None
    assert losses[-1] < max(losses) / 10
    assert _is_finite(run, 100)


def _is_finite(run: RunDir, step: int) -> bool:
    path = checkpoint_names.checkpoint_path(run, step)
    found = checkpoint_store.read_tensors(path, checkpoint_store.read_manifest(path))
    weights = [torch.frombuffer(raw.data, dtype=torch.float32) for name, raw in found.items() if name[:6] == "model/"]
    return bool(weights) and all(bool(one.isfinite().all()) for one in weights)


class Poisoned(Dataset[tuple[Tensor, Tensor]]):
    """Rows of ones, but for those at `bad`, which are not finite."""

    def __init__(self, num_samples: int, bad: set[int]) -> None:
        self.num_samples = num_samples
        self.bad = bad

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = torch.arange(3.0) + index % 5
        return (row * float("nan") if index in self.bad else row), torch.ones(1)


def mean_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def a_recipe(data: Dataset[Any], **more: Any) -> Recipe:
    torch.manual_seed(0)
    return Recipe(
        model=nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)),
        train_data=data,
        loss=mean_square,
        **more,
    )


def test_no_checkpoint_of_weights_that_are_not_finite_takes_the_place_of_one_that_is(tmp_path: Path) -> None:
    """One bad sample late in the first epoch; every step is saved, and one is kept."""
    data = Poisoned(40, {7})

    with pytest.raises(DivergedError, match=r"not finite"):
        trained(tmp_path / "run", a_recipe(data), checkpoint__every_steps=1, checkpoint__keep_last=1)

    run = RunDir(tmp_path / "run")
    (kept,) = checkpoint_names.committed_steps(run)
    assert _is_finite(run, kept)
    bad_step = next(line["step"] for line in read_json_lines(run.metrics) if line["loss"] is None)
    assert kept == bad_step - 1


def test_a_run_whose_last_steps_are_not_finite_does_not_finish(tmp_path: Path) -> None:
    """Too few steps in a row for the limit, and nothing saved before."""
    with pytest.raises(DivergedError, match=r"is not finite since step 1\. .* has no checkpoint"):
        trained(tmp_path / "run", a_recipe(Poisoned(8, {0, 1, 2, 3, 4, 5, 6, 7})), train__max_steps=2)


def test_skip_leaves_out_the_updates_of_bad_batches_and_nothing_of_them_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    training = trained(tmp_path / "run", a_recipe(Poisoned(40, {7})), train__on_nonfinite="skip", train__max_steps=20)

    assert training.state.position.step == 20
    assert all(bool(one.isfinite().all()) for one in training.state.model.state_dict().values())
    assert "its update is skipped" in caplog.text
    losses = [line["loss"] for line in read_json_lines(training.run.metrics)]
    assert losses.count(None) == 2, "the sample comes once an epoch"


class Centred(nn.Module):
    """Subtracts the mean of what it has seen, in place or with a new tensor; the first one it sees it makes anew."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.last, self.how = nn.Linear(3, 1), how
        self.mean: Tensor
        self.spectrum: Tensor | None
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("spectrum", None, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        new = inputs.detach().mean(0)
        if self.how == "in-place":
            self.mean.mul_(0.9).add_(0.1 * new)
        else:
            self.mean = self.mean * 0.9 + 0.1 * new
        spectrum = torch.complex(new, new)
        self.spectrum = spectrum if self.spectrum is None else self.spectrum + spectrum
        return self.last(inputs - self.mean)  # type: ignore[no-any-return]  # a Tensor


@pytest.mark.parametrize("bad", [{7}, set(range(12))], ids=["one", "many"])
def test_skip_restores_what_a_model_replaces_in_its_forward(tmp_path: Path, bad: set[int]) -> None:
    found = {}
    for how in ("in-place", "replaced"):
        torch.manual_seed(0)
        recipe = Recipe(model=Centred(how), train_data=Poisoned(40, bad), loss=mean_square)
        training = trained(tmp_path / how, recipe, train__on_nonfinite="skip", train__max_steps=20)
        model = training.state.model
        assert isinstance(model, Centred)
        assert model.spectrum is not None
        assert all(bool(one.isfinite().all()) for one in model.buffers())
        found[how] = [*model.state_dict().values(), model.spectrum]

    assert all(torch.equal(one, other) for one, other in zip(*found.values(), strict=True))


class Watched(nn.Module):
    """Its forward changes buffers of two types, a parameter that it trains itself, and, if asked, a number."""

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(3, momentum=None), nn.Linear(3, 1)
        self.teacher = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.counts, self.num_calls, self.seen = counts, 0, list[int]()
        self.sums, self.mean = {"calls": 0}, torch.zeros(3)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.counts:
            self.num_calls += 1
            self.seen.append(len(inputs))
            self.sums["calls"] += 1
            self.mean = self.mean * 0.9 + inputs.detach().mean(0)
        self.teacher.data = self.teacher.data * 0.5 + inputs.detach().mean(0)
        return self.last(self.norm(inputs) + 0.1 * self.teacher)  # type: ignore[no-any-return]  # a Tensor


@pytest.mark.parametrize("counts", [False, True], ids=["tensors", "numbers"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_skipped_update_puts_back_all_that_the_forward_has_changed(
    precision: str, fused: bool, counts: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Watched(counts=counts)
    recipe = Recipe(
        model=model,
        train_data=Poisoned(40, {7}),
        loss=mean_square,
        optimizer=lambda model, lr: torch.optim.SGD(
            [one for one in model.parameters() if one.requires_grad], lr=lr, momentum=0.9, fused=fused
        ),
    )

    training = trained(
        tmp_path / "run", recipe, train__on_nonfinite="skip", train__max_steps=10, log__every_steps=10,
        train__precision=precision,
    )  # fmt: skip

    (line,) = read_json_lines(training.run.metrics)
    num_updates = 10 - line["skipped_updates"]
    assert num_updates == 9 or precision == "fp16"  # whose scaler may skip some more, in search of its scale
    assert int(model.norm.num_batches_tracked) == num_updates < 10  # type: ignore[arg-type]  # a buffer
    assert model.num_calls == len(model.seen) == model.sums["calls"] == (num_updates if counts else 0)
    assert bool(model.mean.isfinite().all())
    assert all(bool(one.isfinite().all()) for one in model.state_dict().values())
    assert bool(training.guard.why_waits) == (counts or not fused)


class Decaying(torch.optim.AdamW):
    """Does more in a step than PyTorch's kernels."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for options in self.param_groups:
                torch._foreach_mul_(options["params"], 0.5)
        return super().step(closure)


def with_a_hook(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    def halve(optimizer: torch.optim.Optimizer, *_: object) -> None:
        torch._foreach_mul_([one.data for one in trained_parameters(optimizer)], 0.5)

    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    optimizer.register_step_pre_hook(halve)
    return optimizer


@pytest.mark.parametrize("make", [lambda model, lr: Decaying(model.parameters(), lr=lr, fused=True), with_a_hook])
def test_what_a_step_does_besides_its_kernels_is_left_out_of_a_skipped_update_too(make: Any, tmp_path: Path) -> None:
    """Weights are halved in each step, and the learning rate is 0: they tell how many steps there were."""
    torch.manual_seed(0)
    recipe = a_recipe(Poisoned(40, {7}), optimizer=make)
    before = [one.detach().clone() for one in recipe.model.parameters()]

    trained(tmp_path / "run", recipe, train__on_nonfinite="skip", train__max_steps=10, train__lr=1e-30)

    for now, one in zip(recipe.model.parameters(), before, strict=True):
        torch.testing.assert_close(now.detach(), one * 0.5**9)


@pytest.mark.parametrize("kind", ["SGD", "AdamW", pytest.param("Adagrad", marks=pytest.mark.long)])
def test_a_run_that_does_not_wait_to_skip_has_the_bits_of_one_that_waits(kind: str, tmp_path: Path) -> None:
    found = []
    for waits in ("", "waits"):
        recipe = a_recipe(
            Poisoned(40, {7, 8, 30}),
            optimizer=lambda model, lr: getattr(torch.optim, kind)(model.parameters(), lr=lr, fused=True),
        )

        def after_first_step(training: Training, waits: str = waits) -> None:
            learn = training.guard._see_changes
            training.guard._see_changes = lambda *given: (learn(*given), setattr(training.guard, "why_waits", waits))  # type: ignore[assignment,func-returns-value,method-assign]

        training = trained(
            tmp_path / f"run{waits}", recipe, change=after_first_step, train__on_nonfinite="skip",
            train__max_steps=25, train__ema_decay=0.9, log__every_steps=10,
        )  # fmt: skip
        tensors = [one.tensor for one in training_state.tensors(training.state) if not one.name.startswith("rank.")]
        found.append([*tensors, *(line["skipped_updates"] for line in read_json_lines(training.run.metrics))])

    assert found[0][-3:] == found[1][-3:]
    assert sum(found[0][-3:]) >= 2
    assert all(torch.equal(one, two) for one, two in zip(found[0][:-3], found[1][:-3], strict=True))


def test_a_run_that_does_not_wait_to_skip_ends_when_it_skips_everything(tmp_path: Path) -> None:
    recipe = a_recipe(
        Poisoned(4, {0}), optimizer=lambda model, lr: torch.optim.SGD(model.parameters(), lr=lr, fused=True)
    )

    with pytest.raises(DivergedError, match=r"not finite since step 1\."):
        trained(tmp_path / "run", recipe, train__on_nonfinite="skip", train__max_steps=10_000, log__every_steps=1_000)


def test_skip_knows_sparse_gradients(tmp_path: Path) -> None:
    torch.manual_seed(0)
    recipe = Recipe(
        model=nn.Embedding(5, 1, sparse=True),
        train_data=TensorDataset(torch.arange(8) % 5, torch.tensor([1.0] * 7 + [float("nan")]).unsqueeze(1)),
        loss=mean_square,
        optimizer=lambda model, lr: torch.optim.SparseAdam(model.parameters(), lr=lr),
    )

    training = trained(tmp_path / "run", recipe, train__on_nonfinite="skip", train__max_steps=6)

    assert all(bool(one.isfinite().all()) for one in training.state.model.parameters())


def test_skip_ends_a_run_that_skips_everything(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=r"not finite since step 1\."):
        trained(tmp_path / "run", a_recipe(Poisoned(4, {0})), train__on_nonfinite="skip", train__max_steps=10_000)


def test_ignore_goes_on_and_commits_whatever_it_comes_to(tmp_path: Path) -> None:
    training = trained(tmp_path / "run", a_recipe(Poisoned(4, {0})), train__on_nonfinite="ignore")

    assert checkpoint_names.committed_steps(training.run) == [12]


def test_a_loss_that_is_not_finite_now_and_then_ends_nothing(tmp_path: Path) -> None:
    """Its gradient is zero, so the weights stay finite: some losses are so by nature."""

    def now_and_then(outputs: Tensor, targets: Tensor) -> Tensor:
        loss = mean_square(outputs, targets)
        now_and_then.calls += 1  # type: ignore[attr-defined]
        return loss * 0 + float("inf") if now_and_then.calls % 3 else loss  # type: ignore[attr-defined]

    now_and_then.calls = 0  # type: ignore[attr-defined]
    torch.manual_seed(0)
    recipe = Recipe(model=nn.Linear(3, 1), train_data=Poisoned(40, set()), loss=now_and_then)

    assert trained(tmp_path / "run", recipe).state.position.step == 12


def test_a_mask_of_minus_infinities_is_no_divergence(tmp_path: Path) -> None:
    """As language models keep one, in a buffer."""
    recipe = a_recipe(Poisoned(40, set()))
    recipe.model.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))
    recipe.model.register_parameter("bias", nn.Parameter(torch.tensor([0.0, float("-inf")]), requires_grad=False))

    training = trained(tmp_path / "run", recipe)

    assert checkpoint_names.committed_steps(training.run) == [12]


def test_the_search_of_fp16_for_its_scale_is_no_divergence(tmp_path: Path) -> None:
    """The scaler begins so high that the first gradients overflow: many updates in a row are left out by it."""
    torch.manual_seed(0)  # how high is too high depends on the gradients
    data = TensorDataset(torch.randn(40, 3), torch.full((40, 1), 30.0))
    recipe = a_recipe(data)

    training = trained(tmp_path / "run", recipe, change=scale_too_high)

    assert training.state.scaler is not None
    assert training.state.scaler.get_scale() < 2.0**121, "six updates in a row were left out"
    assert training.state.position.step == 12
    assert checkpoint_names.committed_steps(training.run) == [12]


def test_fp16_trains_with_a_fused_sgd_and_momentum_also_if_its_first_checkpoint_has_no_update_yet(
    tmp_path: Path, nan_in_new_memory: None
) -> None:
    """The loss scaler skips the first steps, and the fused kernels leave the momentum that PyTorch makes there as it is."""

    def end_of(name: str, last: int) -> Training:
        recipe = a_recipe(
            Poisoned(40, set()),
            optimizer=lambda model, lr: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, fused=True),
        )
        return trained(tmp_path / name, recipe, change=overflow, train__precision="fp16", train__max_steps=last)

    def overflow(training: Training) -> None:
        training.state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)

    unbroken = end_of("unbroken", 12)
    end_of("resumed", 2)
    resumed = end_of("resumed", 12)

    skipped = [line["skipped_updates"] for line in read_json_lines(resumed.run.metrics)]
    assert skipped[:3] == [1, 1, 1], "the checkpoint after step 2 has no update yet"
    weights = [[*one.state.model.parameters()] for one in (unbroken, resumed)]
    assert all(bool(one.isfinite().all()) for one in weights[0])
    assert all(map(torch.equal, *weights))


@pytest.fixture
def nan_in_new_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def scale_too_high(training: Training) -> None:
    training.state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)


def test_all_ranks_end_with_the_same_words_though_one_alone_saw_it(tmp_path: Path) -> None:
    """Rank one's losses are not finite, for five steps that lie on both sides of a meeting."""

    def look(group: Group) -> tuple[str, bool]:
        run = RunDir(tmp_path / "run")
        replicas = ReplicaCheck(run, group, attempt=0, every_steps=None)
        watch = LossWatch(made_checkpointer(run, group), replicas, make_state(), policy="stop")
        for step in range(10, 20):
            bad = group.rank_info.rank == 1 and step >= 12
            watch.note(step, torch.tensor(float("nan") if bad else 1.0))
            if step in {11, 13}:
                watch.check()
        try:
            watch.check()
        except DivergedError as error:
            return str(error), True
        return "", False

    said = in_group(2, look, tmp_path / "ranks")

    assert said[0] == said[1]
    assert said[0][1]
    assert "the loss is not finite since step 12." in said[0][0]


def test_a_sample_that_leads_to_nan_on_one_rank_is_tried_once_more_before_the_run_has_diverged(tmp_path: Path) -> None:
    """By itself, one attempt cannot tell it from a wrong bit. A third attempt, which the user submits, is not tried again."""

    def walk(group: Group) -> list[tuple[str, str]]:
        case = Case(recipe=lambda: a_recipe(Poisoned(40, {7})), save_every=2, compare_every=100)
        ends = []
        for attempt in range(3):
            t = begin(case, group, tmp_path / "run", attempt=attempt)
            if group.rank_info.is_rank_zero:
                write_inputs(t.run, AttemptInputs(attempt=attempt, world_size=2, config=""))
            with pytest.raises(DdpHpcError) as raised:
                train(t)
            close(t)
            ends.append((type(raised.value).__name__, str(raised.value)))
        return ends

    said = in_group(2, walk, tmp_path / "ranks")

    assert said[0] == said[1]
    assert [kind for kind, _ in said[0]] == ["RanksDifferError", "DivergedError", "DivergedError"]
    assert "a processor was wrong, or the training diverges; the next attempt computes the step again" in said[0][0][1]
    assert all(re.search(r"since step 1?\d, first on rank [01] on \S+ alone\. Lower", text) for _, text in said[0][1:])
    found = read_difference(RunDir(tmp_path / "run"), 0)
    assert found is not None
    assert (found.odd_ranks, found.told_by) == ((), "")


def made_checkpointer(run: RunDir, group: Group) -> Checkpointer:
    return Checkpointer(run, group, attempt=0, keep=CheckpointSpec())


def test_gradients_without_elements_are_finite() -> None:
    empty = nn.Parameter(torch.zeros(0, 3))
    empty.sum().backward()

    assert not nonfinite._nonfinite_flag(torch.optim.SGD([empty]))
