"""Whole-model state dicts: ordinary tensors under the original names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from sshsdp.checkpoint.state_entries import (
    IncompatibleKeys,
    StateKind,
    state_entries,
    take_extra_states,
)
from sshsdp.comm.agreement import agree
from sshsdp.comm.rendezvous import together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import nn

    from sshsdp.assembly.watch import ModelWatch
    from sshsdp.comm.topology import Topology
    from sshsdp.parameters.slots import ParameterSlot
    from sshsdp.schedule.schedule import Schedule
    from sshsdp.spaces.space import ShardedSpace

__all__ = ["WholeModel"]

T = TypeVar("T")


def _on_host(value: Any) -> Any:
    """A copy of a buffer, or of an extra state and the tensors in it, on the CPU."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu().clone(), value)


class WholeModel:
    """The part of the engine that reads and writes whole models."""

    model: nn.Module
    topology: Topology
    _schedule: Schedule
    _watch: ModelWatch

    @property
    def spaces(self) -> list[ShardedSpace]:
        """All address spaces, unit by unit."""
        raise NotImplementedError

    def _agree(self, entries: list[tuple[str, str]], error: Exception | None, what: str) -> None:
        agree(entries, error, what)

    def full_state_dict(self, *, rank0_only: bool = True) -> dict[str, torch.Tensor]:
        """The model's state dict with whole tensors on the CPU.

        Trainable parameters come from the masters, in the update dtype; frozen ones in the runtime
        dtype; persistent buffers and extra states as they are. Tied names share one tensor.
        Collective; one address space at a time is held whole on the device.

        Args:
            rank0_only: Return an empty dict on the other ranks.
        """
        self._meet("full_state_dict", self._watch.check)
        keeps = not rank0_only or self.topology.world.rank == 0
        parameters: dict[str, torch.Tensor] = {}
        for slot, value in self.whole_parameters():
            if keeps:
                whole = value.to("cpu", copy=True).contiguous()
                parameters.update(dict.fromkeys(slot.aliases, whole))
        if not keeps:
            return {}
        return {
            key: parameters[key]
            if kind is StateKind.PARAMETER
            else _on_host(kind.read(module, attribute))
            for key, module, attribute, kind in state_entries(self.model)
        }

    def whole_parameters(self) -> Iterator[tuple[ParameterSlot, torch.Tensor]]:
        """Every parameter whole, on the device, an address space at a time. Collective.

        Every rank has to go through all of it, and to let go of a tensor before the next.
        """
        for space in self.spaces:
            values = space.collect()
            for slot in space.slots:
                yield slot, space.view_of(slot, values)
            del values

    def load_full_state_dict(
        self, state_dict: Mapping[str, Any], *, strict: bool = True
    ) -> IncompatibleKeys:
        """Load a state dict of whole tensors into masters, runtime parameters and buffers.

        Rank 0's values are used on every rank; the other ranks may pass an empty dict. Collective;
        one address space at a time is held whole on rank 0's device. The next forward uses the
        values.

        Args:
            state_dict: Tensors under the model's own names.
            strict: Refuse missing and unexpected names.

        Returns:
            Missing and unexpected names, the same on every rank.

        Raises:
            RuntimeError: ``strict`` and the names differ; a shape differs; a floating dtype is
                wider than the master's (cast the tensor first if that is wanted); or a forward
                waits for its backward.
        """

        def check() -> None:
            self._watch.check()
            self._refuse_mid_step("load_full_state_dict")

        self._meet("load_full_state_dict", check)
        is_source = self.topology.world.rank == 0
        plan: list[Any] = [self._compare(state_dict, strict) if is_source else None]
        dist.broadcast_object_list(plan, group=self.topology.world.group, group_src=0)
        missing, unexpected, problem = plan[0]
        if problem:
            raise RuntimeError(problem)
        absent = set(missing)
        for space in self.spaces:
            if all(slot.name in absent for slot in space.slots):
                continue
            values = space.collect()
            for slot in space.slots if is_source else ():
                if slot.name not in absent:
                    source = next(state_dict[name] for name in slot.aliases if name in state_dict)
                    space.view_of(slot, values).copy_(source)
            space.scatter(values if is_source else None)
        self._load_others(state_dict if is_source else None, absent)
        self._schedule.free_all()
        return IncompatibleKeys(missing, unexpected)

    def _load_others(self, state_dict: Mapping[str, Any] | None, absent: set[str]) -> None:
        """Have rank 0's buffers and extra states on every rank; the other ranks give None."""
        extras: list[str] = []
        for key, module, attribute, kind in state_entries(self.model):
            if key in absent or kind is StateKind.PARAMETER:
                continue
            if kind is StateKind.EXTRA:
                extras.append(key)
                continue
            buffer = module._buffers[attribute]
            assert buffer is not None
            if state_dict is not None:
                buffer.copy_(state_dict[key])
            self.topology.world.broadcast(buffer, key)
        if extras:
            values: list[Any] = [None]
            if state_dict is not None:
                values = [{key: _on_host(state_dict[key]) for key in extras}]
            dist.broadcast_object_list(values, group=self.topology.world.group, group_src=0)
            take_extra_states(self.model, values[0])

    def _meet(self, caller: str, check: Callable[[], T]) -> T:
        """Check something once all ranks are here; those that do not come are named."""
        if self.topology.world.size != dist.get_world_size():
            # Ranks meet in the store of the default group, and only some of them belong here.
            return check()
        return together(f"engine.{caller}()", check)

    def _refuse_mid_step(self, caller: str) -> None:
        if self._schedule.is_mid_step:
            raise RuntimeError(
                f"engine.{caller}() between forward and backward: the running step would not see "
                "the "
                "new values. Call it between steps"
            )

    def _compare(
        self, state_dict: Mapping[str, Any], strict: bool
    ) -> tuple[list[str], list[str], str | None]:
        slots: dict[str, ParameterSlot] = {
            alias: slot for space in self.spaces for slot in space.slots for alias in slot.aliases
        }
        keys = [key for key, *_ in state_entries(self.model)]
        # A tied parameter is there if any of its names is.
        missing = [
            key
            for key in keys
            if not any(
                name in state_dict for name in (slots[key].aliases if key in slots else (key,))
            )
        ]
        unexpected = [key for key in state_dict if key not in keys]
        problems = [
            problem
            for key, slot in slots.items()
            if key in state_dict and (problem := _mismatch(key, slot, state_dict[key]))
        ]
        if strict and missing:
            problems.append(f"missing: {', '.join(missing)}")
        if strict and unexpected:
            problems.append(f"unexpected: {', '.join(unexpected)}")
        message = "load_full_state_dict: " + "; ".join(problems) if problems else None
        return missing, unexpected, message


def _mismatch(key: str, slot: ParameterSlot, value: Any) -> str | None:
    if not isinstance(value, torch.Tensor):
        return f"{key!r} is a {type(value).__name__}, not a tensor"
    if tuple(value.shape) != slot.shape:
        return f"{key!r} has shape {tuple(value.shape)}, the model's is {slot.shape}"
    target = slot.space.update_dtype
    if (
        value.is_floating_point()
        and torch.promote_types(value.dtype, target) != target
        and value.dtype != slot.original_dtype
    ):
        return (
            f"{key!r} is {value.dtype} and would be rounded to {target}: cast it first if that is "
            "wanted, "
            f"or keep masters in UpdatePolicy(dtype={value.dtype})"
        )
    return None
