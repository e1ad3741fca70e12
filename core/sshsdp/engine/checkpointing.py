"""The part of the engine that saves and loads: distributed checkpoints, optimizer states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from sshsdp.checkpoint import store
from sshsdp.checkpoint.engine_state import (
    check_against,
    model_state,
    optimizer_state,
    optimizer_template,
    restore_optimizer,
)
from sshsdp.engine.whole import IncompatibleKeys, WholeModel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from sshsdp.engine.slots import ParameterSlot
    from sshsdp.engine.space import ShardedSpace
    from sshsdp.optim.binding import OptimizerBinding

__all__ = ["Checkpointing"]


class Checkpointing(WholeModel):
    """Saving and loading of model and optimizers, over any mesh."""

    def _binding_of(self, optimizer: torch.optim.Optimizer, caller: str) -> OptimizerBinding:
        raise NotImplementedError

    def _bindings_for(self, optimizer: Any, caller: str) -> list[OptimizerBinding]:
        if optimizer is None:
            return []
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else [*optimizer]
        return [self._binding_of(one, caller) for one in optimizers]

    # Distributed checkpoints

    def save(
        self,
        path: str | Path,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a ``torch.distributed.checkpoint`` directory. Collective; complete or absent.

        Its keys are ``model`` and ``optimizer``, laid out as FSDP2's ``get_state_dict`` lays them
        out, so FSDP2 programs load it with ``dcp.load``, and any other mesh does with `load`. Each
        rank writes what it holds; nothing is gathered.

        Args:
            path: The directory. A checkpoint that is there is replaced once the new one is
                complete.
            optimizer: Attached optimizer, or several; None saves the model alone.
            extra: A small dict of numbers, strings, tensors and containers of them.

        Raises:
            RuntimeError: A rank failed or did not call; the previous checkpoint is still there.
            ValueError: The optimizer is not attached, or its state cannot be cut.
        """
        self._watch.check()
        self._refuse_mid_step("save")
        state: dict[str, Any] = {"model": self.model_state_dict()}
        bindings = self._bindings_for(optimizer, "save")
        if bindings:
            state["optimizer"] = _merged([optimizer_state(binding) for binding in bindings])
        store.save(state, path, extra or {})

    def load(
        self,
        path: str | Path,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        strict: bool = True,
    ) -> dict[str, Any]:
        """Read a checkpoint that `save` or an FSDP2 program wrote, on any mesh. Collective.

        Each rank reads what it holds, straight into masters and optimizer state. The next forward
        uses the values.

        Args:
            path: The directory.
            optimizer: Attached optimizer(s) whose state is read too; None reads the model alone.
            strict: Refuse missing and unexpected parameters.

        Returns:
            The ``extra`` that was saved.

        Raises:
            FileNotFoundError: No complete checkpoint is there.
            ValueError: Names or shapes differ, a dtype would be narrowed, or the param groups
                differ.
            RuntimeError: A rank failed or did not call, or a forward waits for its backward.
        """
        bindings = self._bindings_for(optimizer, "load")
        self.load_model_checkpoint(path, strict=strict)
        self._load_bindings(bindings, path, "optimizer")
        return store.load_extra(path)

    def load_model_checkpoint(
        self, path: str | Path, key: str = "model", *, strict: bool = True
    ) -> IncompatibleKeys:
        """Read only the model, saved under ``key``, as `load` does.

        Returns:
            Missing and unexpected names (empty lists if ``strict``).
        """
        self._watch.check()
        self._refuse_mid_step("load")
        template = self.model_state_dict()
        metadata = store.read_metadata(path)
        missing, unexpected = check_against(template, metadata, key, strict=strict)
        present = {name: value for name, value in template.items() if name not in missing}
        store.load({key: present}, path)
        self._take_loaded_values()
        return IncompatibleKeys(missing, unexpected)

    def load_optimizer_checkpoint(
        self, optimizer: torch.optim.Optimizer, path: str | Path, key: str = "optimizer"
    ) -> None:
        """Read only an optimizer's state and param groups, saved under ``key``, as `load` does."""
        self._load_bindings([self._binding_of(optimizer, "load")], path, key)

    def model_state_dict(self) -> dict[str, Any]:
        """The model for ``dcp.save`` or ``dcp.load``: this rank's chunks under the original names.

        After a ``dcp.load`` into it, call `after_load`. Local.
        """
        return model_state(self.model, self.spaces)

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """An attached optimizer for ``dcp.save``: chunks of its state by parameter name. Local."""
        return optimizer_state(self._binding_of(optimizer, "optimizer_state_dict"))

    def after_load(self) -> None:
        """Publish masters that were written from outside, such as by ``dcp.load``."""
        self._refuse_mid_step("after_load")
        self._take_loaded_values()

    def _take_loaded_values(self) -> None:
        self._schedule.free_all()
        for space in self.spaces:
            space.publish()

    def _load_bindings(self, bindings: list[OptimizerBinding], path: str | Path, key: str) -> None:
        if not bindings:
            return
        metadata = store.read_metadata(path)
        template = _merged([optimizer_template(binding, metadata, key) for binding in bindings])
        store.load({key: template}, path)
        groups = template["param_groups"]
        rooms = []
        for binding in bindings:
            mine, groups = groups[: len(binding.groups)], groups[len(binding.groups) :]
            loaded = {"state": template["state"], "param_groups": mine}
            rooms.append(restore_optimizer(binding, metadata, key, loaded))
        room = {name: value for one in rooms for name, value in one["state"].items()}
        if room:
            store.load({key: {"state": room}}, path)

    # Whole optimizer states

    def full_optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The ``state_dict`` that the optimizer would have on the unsharded model. Collective.

        Returns:
            On rank 0: state by parameter index, with tensors of the original shapes on the CPU, and
            the param groups. On other ranks: an empty dict.
        """
        binding = self._binding_of(optimizer, "full_optimizer_state_dict")
        is_target = self.topology.world.rank == 0
        state: dict[str, dict[str, Any]] = {}
        for space in binding.spaces:
            for key, source in binding.flat_state(space):
                whole = space.collect(source)
                for slot in space.slots if is_target else ():
                    if key in binding.state_keys(slot):
                        value = space.view_of(slot, whole).to("cpu", copy=True).contiguous()
                        state.setdefault(slot.name, {})[key] = value
            for slot in space.slots if is_target else ():
                state.setdefault(slot.name, {}).update(binding.scalar_state(slot))
        if not is_target:
            return {}
        position = {
            slot.name: index
            for index, slot in enumerate(slot for group in binding.groups for slot in group)
        }
        indices = iter(position.values())
        return {
            "state": {position[name]: values for name, values in state.items() if values},
            "param_groups": [
                {**settings, "params": [next(indices) for _ in slots]}
                for settings, slots in zip(
                    _settings(optimizer.param_groups), binding.groups, strict=True
                )
            ],
        }

    def load_full_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
    ) -> None:
        """Load the ``state_dict`` of the same optimizer on the unsharded model. Collective.

        Args:
            optimizer: Attached.
            state_dict: Rank 0's is used; the other ranks may pass an empty dict.

        Raises:
            ValueError: The param groups have other sizes than the optimizer's.
        """
        binding = self._binding_of(optimizer, "load_full_optimizer_state_dict")
        slots = [slot for group in binding.groups for slot in group]
        whole: dict[str, dict[str, Any]] = {}
        plan: list[Any] = [None]
        if self.topology.world.rank == 0:
            sizes = [len(group["params"]) for group in state_dict["param_groups"]]
            indices = [index for g in state_dict["param_groups"] for index in g["params"]]
            saved = dict(zip((slot.name for slot in slots), indices, strict=False))
            whole = {n: dict(state_dict["state"].get(index, {})) for n, index in saved.items()}
            plan[0] = sizes, _outline(whole, slots), _settings(state_dict["param_groups"])
        dist.broadcast_object_list(plan, group=self.topology.world.group, group_src=0)
        sizes, outline, settings = plan[0]
        expected = [len(group) for group in binding.groups]
        if sizes != expected:
            raise ValueError(
                f"the state dict's param groups have {sizes} parameters, the optimizer's {expected}"
            )
        for group, values in zip(optimizer.param_groups, settings, strict=True):
            group.update(values)
        self._fill(binding, outline, whole)

    def _fill(
        self,
        binding: OptimizerBinding,
        outline: dict[str, dict[str, Any]],
        whole: dict[str, dict[str, Any]],
    ) -> None:
        binding.separate(lambda slot: repr(outline.get(slot.name)))
        optimizer = binding.optimizer
        optimizer.state.clear()
        for space in binding.spaces:
            for key, dtype in _elementwise_keys(space, outline).items():
                values = self._lay_out(space, key, dtype, whole)
                mine = space.scatter_values(values, dtype)
                for update in binding.updates_of(space):
                    if key in outline.get(update.slots[0].name, {}):
                        part = mine[update.start : update.stop].to(update.tensor.device, copy=True)
                        optimizer.state[update.tensor][key] = part
            for update in binding.updates_of(space):
                for key, value in outline.get(update.slots[0].name, {}).items():
                    if not isinstance(value, torch.dtype):
                        kept = value.clone() if isinstance(value, torch.Tensor) else value
                        optimizer.state[update.tensor][key] = kept

    def _lay_out(
        self, space: ShardedSpace, key: str, dtype: torch.dtype, whole: dict[str, dict[str, Any]]
    ) -> torch.Tensor | None:
        if self.topology.world.rank != 0:
            return None
        values = torch.zeros(space.layout.numel, dtype=dtype, device=self.topology.device)
        for slot in space.slots:
            if key in whole.get(slot.name, {}):
                space.view_of(slot, values).copy_(whole[slot.name][key])
        return values


def _merged(states: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "state": {name: value for state in states for name, value in state["state"].items()},
        "param_groups": [group for state in states for group in state["param_groups"]],
    }


def _outline(
    whole: dict[str, dict[str, Any]], slots: Sequence[ParameterSlot]
) -> dict[str, dict[str, Any]]:
    """Scalars as they are; for elementwise tensors their dtype."""
    shape = {slot.name: slot.shape for slot in slots}
    return {
        name: {
            key: value.dtype
            if isinstance(value, torch.Tensor) and _is_elementwise(key, value, shape[name])
            else value
            for key, value in values.items()
        }
        for name, values in whole.items()
        if values
    }


def _is_elementwise(key: str, value: torch.Tensor, shape: tuple[int, ...]) -> bool:
    # The step count of a 0-d parameter has the parameter's shape too.
    return tuple(value.shape) == shape and not (key == "step" and value.ndim == 0)


def _settings(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in groups]


def _elementwise_keys(
    space: ShardedSpace, outline: dict[str, dict[str, Any]]
) -> dict[str, torch.dtype]:
    return {
        key: value
        for slot in space.slots
        for key, value in outline.get(slot.name, {}).items()
        if isinstance(value, torch.dtype)
    }
