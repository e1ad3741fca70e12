"""Pointing an optimizer at update parameters, and keeping both sides in step.

`OptimizerBinding` replaces the model's parameters in the optimizer's param groups, in place, by
update parameters: for each address space one flat 1-D tensor per param group, or, in an
`OwnedSpace`, the matrices that this rank owns (maybe none). Settings, schedulers and wrappers that
hold the optimizer or its groups stay valid.

Note: parameters without a gradient. An update parameter covers many parameters. As long as all of
them get gradients together, that is what the optimizer steps. The first time that no rank used one
of them, the update parameter is cut there (state included), so that from then on the unused part
has ``grad=None`` and is left alone, weight decay and step count included, as in plain torch.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sshsdp.optim.blocks import decide_by_parameter
from sshsdp.optim.granularity import granularity_of
from sshsdp.optim.row_binding import mark_rows
from sshsdp.ownership.owned_space import OwnedSpace, OwnedTensor
from sshsdp.parameters.sharded import ShardedParameter
from sshsdp.parameters.slots import slot_of
from sshsdp.spaces.space import UpdateTensor, space_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from sshsdp.parameters.slots import ParameterSlot
    from sshsdp.spaces.space import ShardedSpace

__all__ = ["OptimizerBinding", "check_groups", "refuse_unattached_optimizers"]


def check_groups(
    optimizer: torch.optim.Optimizer, slots: Sequence[ParameterSlot], first: int = 0
) -> list[list[ParameterSlot]]:
    """The slots of every param group from ``first`` on, frozen parameters included.

    Raises:
        ValueError: The optimizer class does not work on flat pieces, or a group holds a tensor that
            is no parameter of the sharded model.
    """
    granularity_of(optimizer)
    known = {slot.parameter: slot for slot in slots}
    groups = []
    for index, group in enumerate(optimizer.param_groups[first:], first):
        for position, parameter in enumerate(group["params"]):
            if parameter not in known:
                raise ValueError(
                    f"param group {index}, position {position}: a tensor of shape "
                    f"{tuple(parameter.shape)} "
                    "is no parameter of the sharded model. Build the optimizer from "
                    "model.parameters(), of the "
                    "model that was given to sshsdp.shard(), and attach it once"
                )
        groups.append([known[parameter] for parameter in group["params"]])
    return groups


def refuse_unattached_optimizers() -> None:
    """Make every optimizer that holds sharded parameters raise on ``step``. Idempotent."""
    if not _refusal:
        _refusal.append(register_optimizer_step_pre_hook(_refuse))


# The handle of the process-wide hook, once it is there.
_refusal: list[Any] = []


def _refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, ShardedParameter):
                slot = slot_of(parameter)
                name = slot.name if slot else "?"
                raise RuntimeError(
                    f"{type(optimizer).__name__} holds the runtime parameter {name!r} and would "
                    "train nothing: "
                    "call engine.attach(optimizer) before the first step"
                )


class OptimizerBinding:
    """One optimizer and the update parameters that it steps."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: list[list[ParameterSlot]],
        before_step: Callable[[OptimizerBinding], None],
        on_step: Callable[[OptimizerBinding], None],
    ) -> None:
        """Re-point the groups. The spaces' layouts must hold each group contiguously per space."""
        self.optimizer = optimizer
        self.groups: list[list[ParameterSlot]] = []
        decide_by_parameter(optimizer, self._is_quantized)
        old_state = dict(optimizer.state)
        optimizer.state.clear()
        self.extend(groups, old_state)
        self._handles = [
            optimizer.register_step_pre_hook(lambda *_: before_step(self)),
            optimizer.register_step_post_hook(lambda *_: on_step(self)),
        ]

    def extend(
        self, groups: list[list[ParameterSlot]], old_state: Mapping[torch.Tensor, Any] | None = None
    ) -> None:
        """Re-point the param groups that follow those that are bound.

        Args:
            groups: Their parameters.
            old_state: What the optimizer has for the model's parameters already.
        """
        first = len(self.groups)
        self.groups += groups
        for group, slots in zip(self.optimizer.param_groups[first:], groups, strict=True):
            bound = [update for space in self.spaces for update in _bind(space, slots)]
            for update in bound:
                _carry_state_over(self.optimizer, update, old_state or {})
            group["params"] = [update.tensor for update in bound]

    @property
    def _bound_groups(self) -> list[dict[str, Any]]:
        """The param groups without those that were added and not attached yet."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups[: len(self.groups)]
        return groups

    def _is_quantized(self, tensor: torch.Tensor) -> bool:
        return any(u.tensor is tensor and u.slots[0].block > 1 for _, u in self.updates())

    @property
    def spaces(self) -> list[ShardedSpace]:
        """The spaces of its trainable parameters."""
        trainable = [slot for group in self.groups for slot in group if slot.space.trainable]
        return list(dict.fromkeys(space_of(slot) for slot in trainable))

    def check_may_move(self, spaces: Sequence[ShardedSpace]) -> None:
        """Refuse to move parameters that were stepped or have gradients.

        Raises:
            RuntimeError: Some parameter of ``spaces`` has optimizer state or a gradient.
        """
        for update in [update for space in spaces for update in self.updates_of(space)]:
            if self.optimizer.state.get(update.tensor) or update.grad is not None:
                raise RuntimeError(
                    "engine.attach(): this optimizer needs whole matrices, and the parameters "
                    f"around {update.slots[0].name!r} belong to an attached "
                    f"{type(self.optimizer).__name__} that has state or gradients already: attach "
                    "all optimizers in one call, engine.attach([...]), or before the first backward"
                )

    def rebind(self) -> None:
        """Point the groups at the update tensors of spaces that were made anew."""
        for group, slots in zip(self._bound_groups, self.groups, strict=True):
            members = set(slots)
            bound = []
            for space in self.spaces:
                there = [update for update in space.update_tensors if update.slots[0] in members]
                bound += there or _bind(space, slots)
            group["params"] = [update.tensor for update in bound]

    def updates(self) -> Iterator[tuple[int, UpdateTensor]]:
        """``(group index, update tensor)`` in the optimizer's order."""
        by_tensor = {u.tensor: u for space in self.spaces for u in space.update_tensors}
        for index, group in enumerate(self._bound_groups):
            for tensor in group["params"]:
                yield index, by_tensor[tensor]

    def updates_of(self, space: ShardedSpace) -> list[UpdateTensor]:
        """This optimizer's update tensors in one space."""
        mine = {tensor for group in self.optimizer.param_groups for tensor in group["params"]}
        return [update for update in space.update_tensors if update.tensor in mine]

    def drop_unused(self, unused: set[str]) -> None:
        """Let the optimizer skip parameters that no rank used (names as in slots)."""
        self.separate(lambda slot: slot.name in unused)
        for _, update in self.updates():
            if update.slots[0].name in unused:
                update.tensor.grad = None

    def separate(self, label: Callable[[ParameterSlot], object]) -> None:
        """Cut update tensors, and their state, so that all parameters of each have one label."""
        parts: dict[torch.Tensor, list[torch.Tensor]] = {}
        for _, update in list(self.updates()):
            runs = _runs(update.slots, label)
            if len(runs) > 1:
                space = space_of(update.slots[0])
                cut = [_make_update(space, run, within=update) for run in runs]
                _split_state(self.optimizer, update, cut)
                index = space.update_tensors.index(update)
                space.update_tensors[index : index + 1] = cut
                parts[update.tensor] = [part.tensor for part in cut]
        for group in self.optimizer.param_groups:
            group["params"] = [new for old in group["params"] for new in parts.get(old, [old])]

    # State by parameter

    def flat_state(self, space: ShardedSpace) -> Iterator[tuple[str, torch.Tensor]]:
        """Every elementwise state entry over a whole update shard; zeros where there is none."""
        updates = self.updates_of(space)
        keys = {
            key: value.dtype
            for update in updates
            for key, value in self.optimizer.state.get(update.tensor, {}).items()
            if _is_flat(update, value)
        }
        for key, dtype in keys.items():
            flat = torch.zeros_like(space.update_shard, dtype=dtype)
            for update in updates:
                value = self.optimizer.state.get(update.tensor, {}).get(key)
                if value is not None:
                    flat[update.start : update.stop] = value
            yield key, flat

    def state_keys(self, slot: ParameterSlot) -> set[str]:
        """Names of the state entries of one parameter."""
        return set(self._state_of(slot)[1])

    def scalar_state(self, slot: ParameterSlot) -> dict[str, Any]:
        """The state entries of one parameter that are not elementwise, copied."""
        update, state = self._state_of(slot)
        return {k: _copy_scalar(v) for k, v in state.items() if not _is_flat(update, v)}

    def _state_of(self, slot: ParameterSlot) -> tuple[UpdateTensor | None, dict[str, Any]]:
        for update in self.updates_of(space_of(slot)):
            if slot in update.slots:
                return update, self.optimizer.state.get(update.tensor, {})
        return None, {}

    def detach(self) -> None:
        """Stop publishing after steps, and give the groups the model's parameters back."""
        for handle in self._handles:
            handle.remove()
        mine = {tensor for group in self.optimizer.param_groups for tensor in group["params"]}
        for space in self.spaces:
            space.update_tensors = [u for u in space.update_tensors if u.tensor not in mine]
        self.optimizer.state.clear()
        # What `decide_by_parameter` put over the class's own.
        self.optimizer.__dict__.pop("_new_buffer", None)
        for group, slots in zip(self.optimizer.param_groups, self.groups, strict=False):
            group["params"] = [slot.parameter for slot in slots]


def _is_flat(update: UpdateTensor | None, value: Any) -> bool:
    return (
        update is not None
        and isinstance(value, torch.Tensor)
        and value.shape == update.tensor.shape
    )


def _runs(
    slots: list[ParameterSlot], key: Callable[[ParameterSlot], object]
) -> list[list[ParameterSlot]]:
    runs: list[list[ParameterSlot]] = []
    for slot in slots:
        if runs and key(runs[-1][-1]) == key(slot):
            runs[-1].append(slot)
        else:
            runs.append([slot])
    return runs


def _bind(space: ShardedSpace, group: list[ParameterSlot]) -> list[UpdateTensor]:
    members = set(group)
    if isinstance(space, OwnedSpace):
        bound = space.make_update_tensors(members)
    else:
        # A matrix that is cut between rows is a tensor of its own.
        runs = _runs(
            space.slots,
            lambda slot: (slot in members, slot.block, slot.granularity == "row" and slot.name),
        )
        bound = [_make_update(space, run) for run in runs if run[0] in members]
    space.update_tensors += bound
    space.update_tensors.sort(key=lambda update: update.start)
    return bound


def _make_update(
    space: ShardedSpace, slots: list[ParameterSlot], within: UpdateTensor | None = None
) -> UpdateTensor:
    """A leaf over this rank's part of the regions of ``slots``, which are neighbours."""
    low, high = space.update_range
    start = min(max(slots[0].region.start, low), high) - low
    stop = min(max(slots[-1].region.stop, low), high) - low
    tensor = space.update_shard[start:stop].detach().requires_grad_(True)
    if within is not None:
        tensor.requires_grad_(within.tensor.requires_grad)
        if within.grad is not None:
            tensor.grad = within.grad[start - within.start : stop - within.start]
    update = UpdateTensor(tensor, start, slots)
    if slots[0].granularity == "row":
        mark_rows(update)
    return update


def _split_state(
    optimizer: torch.optim.Optimizer, whole: UpdateTensor, parts: list[UpdateTensor]
) -> None:
    state = optimizer.state.pop(whole.tensor, None)
    if state is None:
        return
    for part in parts:
        begin = part.start - whole.start
        optimizer.state[part.tensor] = {
            key: value[begin : begin + part.tensor.numel()].clone()
            if isinstance(value, torch.Tensor) and value.shape == whole.tensor.shape
            else _copy_scalar(value)
            for key, value in state.items()
        }


def _copy_scalar(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _carry_state_over(
    optimizer: torch.optim.Optimizer, update: UpdateTensor, old: Mapping[torch.Tensor, Any]
) -> None:
    """Cut state that the optimizer made in its constructor (Adagrad) or loaded before `attach`."""
    states = [old[slot.parameter] for slot in update.slots if slot.parameter in old]
    if not states:
        return
    if len(states) != len(update.slots):
        raise ValueError(
            "the optimizer has state for some parameters of a group and not for others: attach it "
            "before its "
            f"first step (parameters {[slot.name for slot in update.slots]})"
        )
    if isinstance(update, OwnedTensor):
        optimizer.state[update.tensor].update(_owned_state(update, states[0]))
        return
    space = space_of(update.slots[0])
    low = space.update_range[0] + update.start
    for key, first in states[0].items():
        if not isinstance(first, torch.Tensor) or first.shape != update.slots[0].shape:
            optimizer.state[update.tensor][key] = _copy_scalar(first)
            continue
        flat = torch.zeros_like(update.tensor, dtype=first.dtype, requires_grad=False)
        for slot, state in zip(update.slots, states, strict=True):
            begin = max(slot.region.start, low)
            end = min(slot.region.stop, low + flat.numel())
            if begin < end:
                values = (state[key].mT if slot.region.transposed else state[key]).reshape(-1)
                part = values[begin - slot.region.start : end - slot.region.start]
                flat[begin - low : end - low] = part
        optimizer.state[update.tensor][key] = flat


def _owned_state(update: OwnedTensor, state: dict[str, Any]) -> dict[str, Any]:
    """The part of a whole parameter's state that belongs to one of its matrices."""
    shape = update.matrix.slot.shape
    return {
        key: update.matrix.unit.of(value).clone().contiguous()
        if isinstance(value, torch.Tensor) and value.shape == shape
        else copy.deepcopy(value)
        for key, value in state.items()
    }
