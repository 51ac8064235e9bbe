"""The training state: which tensors and numbers a checkpoint holds, by name, and how they are restored.

Names: `model/WEIGHT`, `ema/WEIGHT`, `optimizer/WEIGHT/KEY`, `rank.R/rng.GENERATOR`, `rank.R/loss_meter`.
Parameters, their averages and the optimizer's state are the same on every rank. Buffers are rank zero's, as in DDP. Each rank
has random generators and a loss meter of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.names import shorten_names
from ddp_hpc.run.checkpoints.shards import select_by_prefix
from ddp_hpc.train.data.sample_order import Position
from ddp_hpc.train.state import group_options, optimizer_state, rng
from ddp_hpc.train.state.moving_average import MovingAverage
from ddp_hpc.train.state.optimizer_state import KeptByOptimizer, SavedTensor

# The names must be those of `shards.ITEM_BYTES_BY_DTYPE`, which knows the same dtypes without torch.
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""PyTorch's dtypes by safetensors' names (https://github.com/huggingface/safetensors#format)."""
_MOST_NAMES = 5
"""How many names a message lists at most."""


class NamedTensor(NamedTuple):
    """A tensor of the training state, and the rank that must write it (None: any rank, since all have the same values)."""

    name: str
    tensor: Tensor
    owner: int | None


@dataclass
class TrainingState:
    """Everything that a resumed run needs to continue as if it had not been interrupted."""

    model: nn.Module
    """The user's own module, not its DDP wrapper."""
    optimizer: torch.optim.Optimizer
    device: torch.device
    rank: int
    world_size: int
    loss_meter: Tensor
    """Float32 scalar, this rank's own: the sum, since the last log line, of its part of each global batch's mean loss."""
    loss_steps: int = 0
    """How many steps are in `loss_meter`."""
    scaler: torch.amp.GradScaler | None = None
    ema: MovingAverage | None = None
    position: Position = Position()
    gradient_order: list[int] | None = None
    """In which order the first attempt's parameters got their gradients, which is that of DDP's buckets (`ddp_warmup`)."""
    plan: dict[str, int] = field(default_factory=dict)
    """`num_samples` of the data and `total_steps` of the training; after a restore, as they were when the checkpoint was saved."""
    has_recipes_optimizer: bool = False
    """Whether the recipe made the optimizer, so that the configuration's keys of it have no effect."""
    options_as_made: list[dict[str, str | None]] = field(init=False, repr=False)
    """The optimizer's options before any step, as the recipe and the configuration set them (see `group_options`)."""
    members_as_made: list[list[int]] = field(init=False, repr=False)
    """The parameters of each group of the optimizer, before any step."""
    attributes_as_made: optimizer_state.Attributes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.options_as_made = group_options.options_as_text(self.optimizer.param_groups)
        self.members_as_made = _group_members(self.optimizer)
        self.attributes_as_made = optimizer_state.attributes(self.model, self.optimizer)

    def kept_of_optimizer(self) -> KeptByOptimizer:
        """Return what a checkpoint holds of the optimizer, but for the options of its groups."""
        return optimizer_state.kept_by_optimizer(self.model, self.optimizer, self.attributes_as_made)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def tensors(state: TrainingState, kept: KeptByOptimizer | None = None) -> list[NamedTensor]:
    """Return the tensors of the state on this rank; those that all ranks have come in the same order on every rank.

    Where `non_tensor_state` is called too, `kept_of_optimizer` can be given to both.
    """
    weights = [one for prefix, module in _modules(state) for one in _weights(prefix, module, state)]
    of_optimizer = [NamedTensor(name, one, None) for name, one in (kept or state.kept_of_optimizer()).tensors.items()]
    generators = {f"rng.{name}": one for name, one in rng.capture(state.device).items()}
    own = {"loss_meter": state.loss_meter, **generators}
    of_rank = [NamedTensor(f"rank.{state.rank}/{name}", one, state.rank) for name, one in own.items()]
    return [*weights, *of_optimizer, *of_rank]


def replicated_tensors(state: TrainingState) -> dict[str, Tensor]:
    """Return the tensors whose values all ranks must have equal and that can be compared, without those that one rank owns.

    The weights have the names that their module gives them: its `state_dict` may rename, copy or leave out what it holds.
    """
    return tensors_to_compare(state)[0]


def tensors_to_compare(state: TrainingState) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return `replicated_tensors`, and by name the tensors that all ranks must have equal but that cannot be compared, with the reason."""
    compared, left_out = dict[str, Tensor](), dict[str, str]()

    def add(name: str, tensor: Tensor) -> None:
        if why := why_not_plain(tensor):
            left_out[name] = why
        else:
            compared[name] = tensor

    names: dict[Tensor, str] = {}
    for name, one in state.model.named_parameters(remove_duplicate=False):
        names.setdefault(one, name)
        add(f"model/{name}", one.detach())
    for name, one in () if state.ema is None else state.ema.module.named_parameters(remove_duplicate=False):
        add(f"ema/{name}", one.detach())
    for parameter, entry in state.optimizer.state.items():
        for key, value in entry.items() if parameter in names and isinstance(entry, dict) else ():
            if isinstance(value, Tensor):
                add(f"optimizer/{names[parameter]}/{key}", value)
    trained = (parameter for group in state.optimizer.param_groups for parameter in group["params"])
    for number, one in enumerate(trained):
        if one not in names:
            left_out[f"optimizer/parameter {number} of shape {[*one.shape]}"] = "not in the model"
    return compared, left_out


def why_not_plain(tensor: Tensor) -> str:
    """Say why a tensor has no plain bytes of its own, one element after another; empty if it has."""
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"of the type {type(tensor).__name__}, whose elements ddp-hpc cannot read"
    if tensor.layout != torch.strided or tensor.is_nested:
        return f"nested or of another layout ({tensor.layout})"
    if tensor.is_quantized:
        return f"quantised ({tensor.dtype})"
    return "on the device `meta`, without memory" if tensor.is_meta else ""


def check(state: TrainingState) -> None:
    """Find out before the first step whether the state can be saved and restored."""
    names = {parameter: name for name, parameter in state.model.named_parameters()}
    for number, group in enumerate(state.optimizer.param_groups):
        outside = [parameter for parameter in group["params"] if parameter not in names]
        if outside:
            raise ConfigError(
                f"The optimizer trains a parameter of shape {tuple(outside[0].shape)} (in its group {number}) that is not "
                "in `Recipe.model`, so no checkpoint would hold it, and the ranks would not exchange its gradients. "
                "Make it part of the model. For a loss with parameters, write `model.criterion = criterion`."
            )
    for name, tensor, _ in tensors(state):
        if tensor.dtype not in DTYPE_NAMES or tensor.layout != torch.strided:
            raise ConfigError(
                f"`{name}` is a tensor of {tensor.dtype} and {tensor.layout}, which a checkpoint cannot hold. "
                "Use a strided tensor of another dtype; for complex numbers, that of `torch.view_as_real`."
            )
        if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ConfigError(
                f"`{name}` was made by `expand`: several of its elements share one address in memory, so it cannot be "
                "restored. Register `tensor.clone()` instead."
            )
    non_tensor_state(state)


def shapes_to_save(state: TrainingState) -> dict[str, dict[str, SavedTensor]]:
    """Return names and shapes of what the model and its average save, for those whose loading only copies tensors."""
    return {prefix: _shapes(module) for prefix, module in _modules(state) if loads_plainly(module)}


def why_not_loadable(state: TrainingState, made: Mapping[str, Mapping[str, SavedTensor]]) -> str:
    """Say why the model could not load what it saves now: its forward has changed what it had when it was `made` (`shapes_to_save`).

    Empty if it could, or if it has loading code of its own, which may do what is needed.
    """
    if _group_members(state.optimizer) != state.members_as_made:
        return (
            "Training has changed which parameters the optimizer has in which of its groups, or their order (`add_param_group`, say), so no run could resume from a checkpoint "
            "of it: a resumed run begins with the groups of the recipe. Leave the groups as they are, and freeze weights by a rate of 0 (`lr` of a group) "
            "or by `weight.grad = None` in the optimizer's step."
        )
    for prefix, module in _modules(state):
        if prefix not in made:
            continue
        now = _shapes(module)
        found = difference_text(made[prefix], now, missing="gone", unknown="new") or shorten_names(
            [
                f"{name} {one.dtype} instead of {made[prefix][name].dtype}"
                for name, one in now.items()
                if one.dtype != made[prefix][name].dtype
            ],
            _MOST_NAMES,
        )
        if found and loads_plainly(module):
            return (
                f"Training has changed which tensors are in the `state_dict` of `Recipe.model` ({found}), so no run could "
                "resume from a checkpoint of it: a new run makes the model without this change. Make these tensors in the "
                "model's constructor, in their last shape; or run one input through the model before the recipe's function "
                "returns it (`with torch.no_grad(): model(inputs)`); or, if they need not be saved, register them with "
                "`persistent=False`."
            )
    return ""


def _group_members(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [[*map(id, group["params"])] for group in optimizer.param_groups]


def _modules(state: TrainingState) -> list[tuple[str, nn.Module]]:
    average: list[Any] = [] if state.ema is None else [("ema", state.ema.module)]
    return [("model", state.model), *average]


def _shapes(module: nn.Module) -> dict[str, SavedTensor]:
    named = module.state_dict().items()
    return {name: SavedTensor(one.shape, one.dtype) for name, one in named if isinstance(one, Tensor)}


def non_tensor_state(state: TrainingState, kept: KeptByOptimizer | None = None) -> dict[str, Any]:
    """Return the part of the state that is not tensors, as JSON; the same on every rank."""
    groups = [{key: one for key, one in group.items() if key != "params"} for group in state.optimizer.param_groups]
    own_options = group_options.changed_options(state.optimizer.param_groups, state.options_as_made)
    return {
        "position": asdict(state.position),
        "loss_steps": state.loss_steps,
        "optimizer": {
            "type": type(state.optimizer).__name__,
            "groups": group_options.options_for_manifest(groups),
            **(kept or state.kept_of_optimizer()).as_json(),
            **({"own_options": own_options} if own_options else {}),
        },
        "scaler": None if state.scaler is None else state.scaler.state_dict(),
        "ema_updates": None if state.ema is None else state.ema.num_updates,
        **({"ema_warms_up": True} if state.ema is not None and state.ema.warms_up else {}),
    }


class Restoration:
    """Restores a state's tensors and numbers from a checkpoint.

    The caller reads the checkpoint into the tensors of `into`, which are the state's own wherever that is possible, and calls
    `finish`. If the number of ranks has changed, the random generators cannot be restored: each is seeded from (seed, step,
    rank), and rank zero gets the sum of all loss meters. Of the optimizer's options, those are restored that the optimizer has
    changed or added itself, such as a count of steps. The others are not: those of the configuration and the recipe apply, so
    that changing them before a resume has an effect.
    """

    def __init__(
        self,
        state: TrainingState,
        saved: Mapping[str, SavedTensor],
        plain: Mapping[str, Any],
        *,
        seed: int,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """Decide which tensor is read into which object; `state` stays unchanged. `plain` and `about` are a manifest's `state` and `made`."""
        self._state = state
        self._plain = plain
        self._about = about or {}
        self._seed = seed
        self._has_average = any(name.startswith("ema/") for name in saved)
        modules = _modules(state) if self._has_average else [("model", state.model)]
        self._weights = [_WeightsToLoad(module, saved, prefix, state.rank) for prefix, module in modules]
        content = plain["optimizer"]
        self._of_optimizer, of_optimizer = optimizer_state.state_to_fill(state.model, state.optimizer, content, saved)
        self._own_options = content.get("own_options", [])
        group_options.check(state.optimizer.param_groups, self._own_options)
        starts = (f"rank.{state.rank}/rng.", f"rank.{state.rank}/loss_meter")  # and on rank zero, all loss meters
        of_ranks = [name for name in saved if name.startswith("rank.")]
        own = [
            name for name in of_ranks if name.startswith(starts) or (state.rank == 0 and name.endswith("/loss_meter"))
        ]
        self._own = {name: saved[name].empty() for name in own}
        self._num_ranks = len({name.partition("/")[0] for name in of_ranks})
        self.into: dict[str, Tensor] = self._own | of_optimizer
        """Where to read each tensor that this rank needs: of the saved shape and dtype, on any device, with any strides."""
        for weights in self._weights:
            self.into |= weights.into

    def finish(self) -> None:
        """Use what was read into the tensors, and restore the numbers."""
        state, plain = self._state, self._plain
        for weights in self._weights:
            weights.load()
        if state.ema is not None:
            if self._has_average:
                state.ema.num_updates = plain["ema_updates"]
                state.ema.warms_up = plain.get("ema_warms_up", False)
            else:
                state.ema.module.load_state_dict(state.model.state_dict())
        if state.scaler is not None and plain["scaler"]:
            state.scaler.load_state_dict(plain["scaler"])
        state.optimizer.state.update(self._of_optimizer)
        group_options.restore_options(state.optimizer.param_groups, self._own_options, state.device)
        group_options.restore_options([vars(state.optimizer)], [plain["optimizer"].get("attributes", {})], state.device)
        state.position = Position(**plain["position"])
        state.gradient_order = self._about.get("gradient_order")
        state.plan = dict(self._about.get("plan", {}))
        self._take_own()
        state.loss_steps = plain.get("loss_steps", 0)
        if "loss_steps" not in plain:  # an older checkpoint does not say how many steps are in the meter
            state.loss_meter.zero_()

    def _take_own(self) -> None:
        state, own = self._state, f"rank.{self._state.rank}/"
        if self._num_ranks == state.world_size:
            state.loss_meter.copy_(self._own[f"{own}loss_meter"])
            rng.restore(select_by_prefix(f"{own}rng.", self._own), state.device)
            return
        meters = [one for name, one in sorted(self._own.items()) if name.endswith("/loss_meter")]
        state.loss_meter.copy_(torch.stack(meters).sum() if state.rank == 0 else torch.zeros(()))
        rng.seed_everything("rank", self._seed, state.position.step, state.rank)


# --- weights ---------------------------------------------------------------------------------------------------------


def _weights(prefix: str, module: nn.Module, state: TrainingState) -> Iterator[NamedTensor]:
    shared = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    is_each_ranks = per_rank_predicate(state.model)
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"The model's `state_dict` has {name!r} of type {type(value).__name__}, but a checkpoint can hold only tensors. "
                "Register it as a buffer, or remove `get_extra_state`."
            )
        is_own = is_each_ranks(name)
        own = f"rank.{state.rank}/" if is_own and state.rank else ""
        owner = state.rank if is_own else None if name in shared else 0
        yield NamedTensor(f"{own}{prefix}/{name}", value, owner)


def per_rank_predicate(model: nn.Module) -> Callable[[str], bool]:
    """Return what tells whether each rank has a value of its own under a name of a `state_dict`: DDP does not send rank zero's to all."""
    ignored = frozenset(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    return lambda name: name.rpartition(".")[2] == "_extra_state" or name in ignored


class _WeightsToLoad:
    """A module's tensors, to be filled in place.

    If `load_state_dict` would only copy into the module's own tensors, these are filled directly, and it is not called. A
    module with loading code of its own gets a call of `load_state_dict` at the end, as from any script, with tensors that are
    not its own: its code may reset the module before it reads them. Until then, such a module's weights are in memory twice.
    """

    def __init__(self, module: nn.Module, saved: Mapping[str, SavedTensor], prefix: str, rank: int) -> None:
        starts = (f"{prefix}/", f"rank.{rank}/{prefix}/")
        names = {name.removeprefix(start): name for start in starts for name in saved if name.startswith(start)}
        found = {name: saved[full] for name, full in names.items()}
        own = module.state_dict()
        misfits = difference_text(own, found)
        self._module = module
        self._is_plain = loads_plainly(module)
        if misfits and self._is_plain:
            raise _other_model_error(misfits)
        kept = {name: one for name, one in own.items() if self._is_plain and _can_be_filled(one, found[name])}
        self._found = {name: kept[name] if name in kept else one.empty() for name, one in found.items()}
        self._is_in_place = len(kept) == len(found)
        self.into = {names[name]: one for name, one in self._found.items()}

    def load(self) -> None:
        """Load into the module what was read into the tensors."""
        if self._is_plain and self._is_in_place:
            return
        try:
            load(self._module, self._found)
        except RuntimeError as error:
            raise _other_model_error(difference_text(self._module.state_dict(), self._found) or str(error)) from error


def load(module: nn.Module, found: Mapping[str, Tensor]) -> None:
    """Load a complete `state_dict`; where the module itself leaves some out of it, as adapters do, these keep what the recipe gave them."""
    try:
        module.load_state_dict(found)
    except RuntimeError:
        if difference_text(module.state_dict(), found) or not module.state_dict().keys() < named_tensors(module).keys():
            raise
        module.load_state_dict(found, strict=False)


def _other_model_error(misfits: str) -> ConfigError:
    return ConfigError(
        f"The checkpoint is of another model: {misfits}. Undo the change of the "
        "recipe, start over with `ddp-hpc submit --fresh`, or give the run a new `name`."
    )


def _can_be_filled(own: Any, saved: SavedTensor) -> bool:
    """Return whether the saved bytes can be written into a tensor: a plain one, of the saved dtype, that has memory."""
    return (
        type(own) in (Tensor, nn.Parameter)
        and (own.dtype, own.layout, own.device.type != "meta") == (saved.dtype, torch.strided, True)
        and not (own.is_conj() or own.is_neg())
    )


_LOADING_METHODS = (
    *("load_state_dict", "_load_from_state_dict", "set_extra_state"),
    *("state_dict", "_save_to_state_dict", "get_extra_state"),
)
_LOADING_HOOKS = (
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)


def loads_plainly(module: nn.Module) -> bool:
    """Return whether loading a complete state into the module only copies tensors: no part of it has loading code."""
    return not any(_has_loading_code(part) for part in module.modules())


def _has_loading_code(part: nn.Module) -> bool:
    if any(getattr(part, hooks, None) for hooks in _LOADING_HOOKS) or not vars(part).keys().isdisjoint(
        _LOADING_METHODS
    ):
        return True
    return any(
        getattr(type(part), name) is not getattr(nn.Module, name)
        # Batch norm's own loading code only adds a counter that files written before PyTorch 0.4.1 lack.
        and getattr(type(part), name) is not getattr(nn.BatchNorm1d, name)
        for name in _LOADING_METHODS
    )


def difference_text(
    own: Mapping[str, Tensor | SavedTensor],
    found: Mapping[str, Tensor | SavedTensor],
    *,
    missing: str = "missing",
    unknown: str = "unknown",
) -> str:
    """Return how names and shapes of `found` differ from those of the model, `own`; empty if they do not.

    `missing` and `unknown` are the words for what only the model has, and for what only `found` has.
    """
    changed = [name for name in sorted(own.keys() & found.keys()) if own[name].shape != found[name].shape]
    shapes = [f"{name} {tuple(found[name].shape)} instead of {tuple(own[name].shape)}" for name in changed]
    parts = {
        missing: sorted(own.keys() - found.keys()),
        unknown: sorted(found.keys() - own.keys()),
        "of another shape": shapes,
    }
    return "; ".join(f"{what}: {shorten_names(names, _MOST_NAMES)}" for what, names in parts.items() if names)
