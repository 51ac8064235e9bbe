"""Ends a replay at its last step, and writes down what its steps computed, in the order in which they did.

Each rank writes a line a step. `entries` has the order of causes: a difference in one explains those after it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import IO, Any

import torch
import xxhash
from torch import Tensor, nn

from ddp_hpc.base.durable import make_directories, open_private
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.record import read_record
from ddp_hpc.run.run_dir.replays import ReplayRequest
from ddp_hpc.train.data.sample_order import GlobalBatch, MicroBatch
from ddp_hpc.train.data.sample_records import StepObserver
from ddp_hpc.train.engine.training import Training
from ddp_hpc.train.engine.weighted_loss import compute_loss
from ddp_hpc.train.recipe import Loss, WeightedLoss
from ddp_hpc.train.state import digests, rng, training_state

Entry = dict[str, Any]
"""`kind`, `name`, `hash`, and of a tensor `type` and `norm` (of a single number, its value); of a batch, `rows`: a hash of each sample."""


def set_up_replay(t: Training) -> None:
    """Have the training end where its run directory asks for, if it is that of a replay; otherwise do nothing."""
    request = read_record(t.run.replay_request, ReplayRequest)
    if request is None:
        return
    path = t.run.rank_trace(t.group.rank_info.rank)
    make_directories(path.parent)
    trace = _StepTrace(t, request, open_private(path, "ab", buffering=0))
    if request.trace_from is not None:
        trace.add_hooks()
    t.after_step = trace.after_step


class _StepTrace(StepObserver):
    """Writes what the steps of one rank compute; it sees each pass that counts."""

    def __init__(self, t: Training, request: ReplayRequest, file: IO[bytes]) -> None:
        self._t = t
        self._request = request
        self._file = file
        self._entries: list[Entry] = []
        """Of the micro batches of this step."""
        self._passed: list[Entry] = []
        """Of the micro batch that is computed now; DDP's warm-up begins one that never counts."""
        self._has_begun = False
        self._is_start_checked = False

    def add_hooks(self) -> None:
        """Listen to the recipe, the model and the optimizer from here on."""
        t = self._t
        split, loss = partial(self._note_inputs, t.recipe.inputs_and_targets), partial(self._note_loss, t.recipe.loss)
        t.recipe = replace(t.recipe, inputs_and_targets=split, loss=loss)
        t.observers.append(self)
        t.state.optimizer.register_step_pre_hook(lambda *_: self._note_gradients("used gradient"))
        for name, parameter in t.state.model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(self._note_gradient, name))
        if not t.spec.train.compile:  # a hook would change what is compiled
            for name, module in t.state.model.named_modules():
                module.register_forward_hook(partial(self._note_output, name or "(the model)"))

    def after_step(self) -> bool:
        """Write down the step that was taken; return whether it was the last one."""
        t, request, step = self._t, self._request, self._t.state.position.step
        if not self._is_start_checked and request.start_step not in (None, step - 1):
            raise ConfigError(
                f"The replay begins after step {request.start_step}, but the newest checkpoint up to there is that of step {step - 1}: "
                "the run has deleted the other, as a training run keeps only its newest checkpoints. Give the same command again."
            )
        self._is_start_checked = True
        if request.is_traced(step):
            options = [
                {"kind": "option", "name": f"group {number}, {key}", "hash": repr(value)}
                for number, group in enumerate(t.state.optimizer.param_groups)
                for key, value in group.items()
                if key != "params"
            ]
            self._write({"step": step, "entries": [*self._entries, *options, *_state_entries(t)]})
        if request.every_state or step in request.state_steps:
            self._write_state(step, is_whole=step in request.state_steps)
        if step in request.digest_steps:
            # As all ranks have them: in DDP, buffers are rank zero's.
            tensors = training_state.replicated_tensors(t.state)
            self._write({"step": step, "digest": digests.combined_digest(digests.digests_of_tensors(tensors))})
        self._entries = []
        if step < request.end_step:
            return False
        if request.commits:
            t.checkpointer.save_and_wait(t.state, metrics={})
        return True

    def _write_state(self, step: int, *, is_whole: bool) -> None:
        tensors = {one.name: digest_of(one.tensor) for one in training_state.tensors(self._t.state)}
        numbers = training_state.non_tensor_state(self._t.state)
        # Two runs may log at other steps: that is no difference of what they train.
        trained = {name: seal for name, seal in tensors.items() if not name.endswith(_LOSS_METER)}
        counted = {name: one for name, one in numbers.items() if name != "loss_steps"}
        together = xxhash.xxh3_64_hexdigest(json.dumps([trained, counted], sort_keys=True).encode())
        line = {"step": step, "state": together}
        self._write({**line, "tensors": tensors, "numbers": numbers} if is_whole else line)

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")

    def _is_wanted(self) -> bool:
        """Tell whether the step that is computed now is one to write down."""
        return self._request.is_traced(self._t.state.position.step + 1)

    # --- in the order of a step ---

    def _note_inputs(self, inputs_and_targets: Callable[[Any], tuple[Any, Any]], batch: Any) -> tuple[Any, Any]:
        """Note what a micro batch begins with: the random generators and the samples' content."""
        inputs, targets = inputs_and_targets(batch)
        if not self._is_wanted():
            return inputs, targets
        t = self._t
        if not self._has_begun:
            self._has_begun = True
            self._write({"step": t.state.position.step, "entries": [*_state_entries(t)]})
        generators = rng.capture(t.group.device)
        self._passed = [_entry("random generator", name, one) for name, one in generators.items()]
        self._passed += [
            {**_entry("batch", f"{word}{name}", one), "rows": [digest_of(row) for row in one] if one.dim() else []}
            for word, part in (("inputs", inputs), ("targets", targets))
            for name, one in _tensors_in(part)
        ]
        return inputs, targets

    def _note_output(self, name: str, _module: nn.Module, _inputs: Any, outputs: Any) -> None:
        if self._is_wanted() and torch.is_grad_enabled():
            self._passed += [_entry("output", f"{name}{more}", one) for more, one in _tensors_in(outputs)]

    def _note_loss(self, of_recipe: Loss, outputs: Any, targets: Any) -> Any:
        value, weight = compute_loss(of_recipe, outputs, targets)
        loss = value if weight is None else WeightedLoss(value, weight)
        if self._is_wanted():
            self._passed += [_entry("loss", name, one) for name, one in _tensors_in(loss, "loss")]
        return loss

    def _note_gradient(self, name: str, parameter: Tensor) -> None:
        if self._is_wanted() and parameter.grad is not None:
            self._passed.append(_entry("gradient", name, parameter.grad))

    def note(self, plan: MicroBatch, delivered: Sequence[int]) -> None:
        """Keep a micro batch that counts; `delivered` are the ids of its samples."""
        if not self._is_wanted():
            return
        number = sum(one["kind"] == "samples" for one in self._entries)
        ids = list(delivered)[: plan.num_real]
        self._entries.append({"kind": "samples", "name": f"micro batch {number}", "hash": str(ids), "ids": ids})
        self._entries += self._passed
        self._passed = []

    def record(self, plan: GlobalBatch) -> None:  # noqa: ARG002  the protocol's
        """Note the buffers, and the gradients that all ranks have together."""
        if self._is_wanted():
            self._entries += [_entry("buffer", name, one) for name, one in self._t.state.model.named_buffers()]
            self._note_gradients("summed gradient")

    def close(self) -> None:
        self._file.close()

    def _note_gradients(self, kind: str) -> None:
        if self._is_wanted():
            named = self._t.state.model.named_parameters()
            self._entries += [_entry(kind, name, one.grad) for name, one in named if one.grad is not None]


def _state_entries(t: Training) -> Iterator[Entry]:
    """Yield the state after a step: moments, weights, averages, then what is each rank's own."""
    named = training_state.tensors(t.state)
    for kind, prefix in _PREFIX_BY_STATE_KIND.items():
        for one in named:
            if one.name.startswith(prefix) and not one.name.endswith(_LOSS_METER):
                yield _entry(kind, one.name.removeprefix(prefix), one.tensor)
    if t.state.scaler is not None:
        scale = t.state.scaler.state_dict()
        yield {"kind": "option", "name": "loss scale", "hash": json.dumps(scale, sort_keys=True)}


_LOSS_METER = "/loss_meter"
"""What a rank adds up to log it."""
_PREFIX_BY_STATE_KIND = {"moment": "optimizer/", "weight": "model/", "average": "ema/", "of the rank": "rank."}
"""What the state holds, with the prefix of its names in a checkpoint; in the order in which one follows from another."""


def _entry(kind: str, name: str, tensor: Tensor) -> Entry:
    value = tensor.detach()
    described = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    is_number = value.is_floating_point() and value.layout == torch.strided
    norm = None if not is_number else value.item() if value.numel() == 1 else float(value.double().norm())
    return {"kind": kind, "name": name, "hash": digest_of(value), "type": described, "norm": norm}


def digest_of(tensor: Tensor) -> str:
    """Return the xxh3_64 of a tensor's bytes, as a checkpoint holds them."""
    value = tensor.detach()
    value = value.to_dense() if value.layout != torch.strided else value
    content: Any = value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_64_hexdigest(content)


def _tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested mappings and sequences, with where they are (`[0]`, `.mask`)."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors_in(item, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _tensors_in(item, f"{name}[{number}]")
