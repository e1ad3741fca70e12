"""Whole-model state dicts: ordinary tensors under the original names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from sshsdp.engine.agreement import agree

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

    from sshsdp.engine.schedule import Schedule
    from sshsdp.engine.slots import ParameterSlot
    from sshsdp.engine.space import ShardedSpace
    from sshsdp.engine.topology import Topology
    from sshsdp.engine.watch import ModelWatch

__all__ = ["IncompatibleKeys", "WholeModel", "state_entries"]


class IncompatibleKeys(NamedTuple):
    """Keys that a state dict lacks, and keys that it has too many."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def state_entries(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, bool]]:
    """``(key, module, attribute, is_parameter)`` in ``state_dict`` order, persistent ones."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                yield dot + attribute, module, attribute, True
        for attribute, buffer in module._buffers.items():
            if buffer is not None and attribute not in module._non_persistent_buffers_set:
                yield dot + attribute, module, attribute, False


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
        dtype; persistent buffers as they are. Tied names share one tensor. Collective; one address
        space at a time is held whole on the device.

        Args:
            rank0_only: Return an empty dict on the other ranks.
        """
        self._watch.check()
        keeps = not rank0_only or self.topology.world.rank == 0
        parameters: dict[str, torch.Tensor] = {}
        for space in self.spaces:
            values = space.collect()
            for slot in space.slots if keeps else ():
                whole = space.view_of(slot, values).to("cpu", copy=True).contiguous()
                parameters.update(dict.fromkeys(slot.aliases, whole))
        if not keeps:
            return {}
        return {
            key: parameters[key]
            if is_parameter
            else module._buffers[attribute].detach().cpu().clone()  # type: ignore[union-attr]
            for key, module, attribute, is_parameter in state_entries(self.model)
        }

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
        self._watch.check()
        self._refuse_mid_step("load_full_state_dict")
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
        for key, module, attribute, is_parameter in state_entries(self.model):
            buffer = module._buffers.get(attribute)
            if not is_parameter and key not in absent and buffer is not None:
                if is_source:
                    buffer.copy_(state_dict[key])
                self.topology.world.broadcast(buffer, key)
        self._schedule.free_all()
        return IncompatibleKeys(missing, unexpected)

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
