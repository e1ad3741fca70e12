"""The part of the engine that saves and loads: distributed checkpoints, optimizer states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from sshsdp.checkpoint import store
from sshsdp.checkpoint.model_state import check_against, model_state, present
from sshsdp.checkpoint.optimizer_state import (
    SavedOptimizer,
    exact,
    is_elementwise,
    optimizer_state,
    place_scalar,
    scalar_keys,
    take_settings,
)
from sshsdp.checkpoint.owned_state import gather_states, scatter_states
from sshsdp.checkpoint.state_entries import IncompatibleKeys, take_extra_states
from sshsdp.comm.rendezvous import together
from sshsdp.engine.whole_state import WholeModel
from sshsdp.optim.blocks import quantize_again
from sshsdp.ownership.owned_space import OwnedSpace, is_owned

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from sshsdp.engine.attachments import Attachments
    from sshsdp.optim.binding import OptimizerBinding
    from sshsdp.spaces.space import ShardedSpace

__all__ = ["Checkpointing"]


class Checkpointing(WholeModel):
    """Saving and loading of model and optimizers, over any mesh."""

    _attachments: Attachments

    def _bindings_for(self, optimizer: Any, caller: str) -> list[OptimizerBinding]:
        if optimizer is None:
            return []
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else [*optimizer]
        return [self._attachments.binding_of(one, caller) for one in optimizers]

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
            RuntimeError: A rank failed or did not call, or what is at ``path`` is no checkpoint.
                What was there before is still there.
            ValueError: The optimizer is not attached, its state cannot be cut, or ``extra`` could
                not be read back.
        """

        def state() -> dict[str, Any]:
            self._watch.check()
            self._refuse_mid_step("save")
            model = {"model": self.model_state_dict()}
            bindings = self._bindings_for(optimizer, "save")
            return {**model, "optimizer": optimizer_state(bindings)} if bindings else model

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
            ValueError: Names or shapes differ, a dtype would be narrowed, the param groups
                differ, or there is no optimizer in the checkpoint. Nothing was read then.
            RuntimeError: A rank failed or did not call, or a forward waits for its backward.
        """
        _, extra = self._load(path, "model", optimizer, "optimizer", strict=strict)
        return extra

    def load_model_checkpoint(
        self, path: str | Path, key: str = "model", *, strict: bool = True
    ) -> IncompatibleKeys:
        """Read only the model, saved under ``key``, as `load` does.

        Returns:
            Missing and unexpected names (empty lists if ``strict``).
        """
        keys, _ = self._load(path, key, None, "", strict=strict)
        return keys

    def load_optimizer_checkpoint(
        self, optimizer: torch.optim.Optimizer, path: str | Path, key: str = "optimizer"
    ) -> None:
        """Read only an optimizer's state and param groups, saved under ``key``, as `load` does."""
        self._load(path, None, optimizer, key, strict=True)

    def _load(
        self,
        path: str | Path,
        model_key: str | None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
        optimizer_key: str,
        *,
        strict: bool,
    ) -> tuple[IncompatibleKeys, dict[str, Any]]:
        """Check all, then read all; None leaves the model out. Returns differing names, extra."""
        keys = IncompatibleKeys([], [])
        room: dict[str, Any] = {}

        def check() -> tuple[SavedOptimizer | None, dict[str, Any]]:
            self._watch.check()
            self._refuse_mid_step("load")
            bindings = self._bindings_for(optimizer, "load")
            metadata = store.read_metadata(path)
            if model_key is not None:
                template = self.model_state_dict()
                missing, unexpected = check_against(
                    template, metadata, model_key, strict=strict, spaces=self.spaces
                )
                keys.missing_keys.extend(missing)
                keys.unexpected_keys.extend(unexpected)
                room[model_key] = present(template, metadata, model_key)
            saved = SavedOptimizer.find(bindings, metadata, optimizer_key) if bindings else None
            return saved, store.load_extra(path)

        saved, extra = together("engine.load()", check)
        if saved is not None:
            scalars = {optimizer_key: saved.scalars()}
            store.read(scalars, path)
            if state := saved.restore(scalars[optimizer_key]):
                room[optimizer_key] = {"state": state}
        if any(room.values()):
            store.read(room, path)
        for binding in saved.bindings if saved is not None else ():
            quantize_again(binding.optimizer)
        if model_key is not None:
            take_extra_states(self.model, room[model_key])
            self._take_loaded_values()
        return keys, extra

    @property
    def update_shards(self) -> list[torch.Tensor]:
        """This rank's masters: one flat tensor for each address space of trainable parameters.

        Where a value lies in them is the layout's business; elementwise work on all of them, such
        as an average over steps, needs no more. After writing to them, call `after_load`.
        """
        return [space.update_shard for space in self.spaces if space.trainable]

    def model_state_dict(self, shards: Sequence[torch.Tensor] | None = None) -> dict[str, Any]:
        """The model for ``dcp.save`` or ``dcp.load``: this rank's chunks under the original names.

        After a ``dcp.load`` into it, call `after_load`; extra states that were read into it are the
        caller's to hand to ``set_extra_state``. Local.

        Args:
            shards: Values to show instead of the masters, one tensor for each of `update_shards`.
        """
        return model_state(self.model, self.spaces, shards)

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """An attached optimizer for ``dcp.save``: chunks of its state by parameter name. Local."""
        return optimizer_state([self._attachments.binding_of(optimizer, "optimizer_state_dict")])

    def after_load(self) -> None:
        """Publish masters that were written from outside, such as by ``dcp.load``."""
        self._refuse_mid_step("after_load")
        self._take_loaded_values()

    def _take_loaded_values(self) -> None:
        self._schedule.free_all()
        for space in self.spaces:
            space.take_loaded_values()

    # Whole optimizer states

    def full_optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The ``state_dict`` that the optimizer would have on the unsharded model. Collective.

        Returns:
            On rank 0: state by parameter index, with tensors of the original shapes on the CPU, and
            the param groups. On other ranks: an empty dict.
        """
        binding = self._meet(
            "full_optimizer_state_dict",
            lambda: self._attachments.binding_of(optimizer, "full_optimizer_state_dict"),
        )
        is_target = self.topology.world.rank == 0
        state: dict[str, dict[str, Any]] = {}
        for space in binding.spaces:
            if isinstance(space, OwnedSpace):
                state.update(gather_states(binding, space, self.topology))
                continue
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
            ValueError: The param groups have other sizes than the optimizer's, or a state tensor is
                neither a scalar nor of its parameter's shape.
        """
        binding = self._meet(
            "load_full_optimizer_state_dict",
            lambda: self._attachments.binding_of(optimizer, "load_full_optimizer_state_dict"),
        )
        whole: dict[str, dict[str, Any]] = {}
        plan: list[Any] = [None]
        if self.topology.world.rank == 0:
            try:
                whole = _by_name(binding, state_dict)
                plan[0] = _outline(binding, whole), _settings(state_dict["param_groups"])
            except (KeyError, TypeError, ValueError) as error:
                plan[0] = f"load_full_optimizer_state_dict: {type(error).__name__}: {error}"
        dist.broadcast_object_list(plan, group=self.topology.world.group, group_src=0)
        if isinstance(plan[0], str):
            raise ValueError(plan[0])
        outline, settings = plan[0]
        with torch.no_grad():
            for group, values in zip(optimizer.param_groups, settings, strict=True):
                take_settings(group, values)
        self._fill(binding, outline, whole)
        for space in binding.spaces:
            if isinstance(space, OwnedSpace):
                scatter_states(binding, space, self.topology, whole)

    def _fill(
        self,
        binding: OptimizerBinding,
        outline: dict[str, dict[str, Any]],
        whole: dict[str, dict[str, Any]],
    ) -> None:
        binding.separate(lambda slot: exact(outline.get(slot.name, {})))
        optimizer = binding.optimizer
        optimizer.state.clear()
        for space in [space for space in binding.spaces if not isinstance(space, OwnedSpace)]:
            for key, dtype in _elementwise_keys(space, outline).items():
                values = self._lay_out(space, key, dtype, whole)
                mine = space.scatter_values(values, dtype)
                for update in binding.updates_of(space):
                    if isinstance(outline.get(update.slots[0].name, {}).get(key), torch.dtype):
                        part = mine[update.start : update.stop].to(update.tensor.device, copy=True)
                        optimizer.state[update.tensor][key] = part
        for index, update in binding.updates():
            for key, value in outline.get(update.slots[0].name, {}).items():
                if not isinstance(value, torch.dtype):
                    group = optimizer.param_groups[index]
                    placed = place_scalar(value, key, update.tensor, group)
                    optimizer.state[update.tensor][key] = placed
        quantize_again(optimizer)

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


def _by_name(binding: OptimizerBinding, state_dict: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """State by parameter name out of an ordinary optimizer state dict."""
    sizes = [len(group["params"]) for group in state_dict["param_groups"]]
    expected = [len(group) for group in binding.groups]
    if sizes != expected:
        raise ValueError(
            f"the state dict's param groups have {sizes} parameters, the optimizer's {expected}"
        )
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    names = [slot.name for group in binding.groups for slot in group]
    states = state_dict["state"]
    return {n: dict(states[i]) for n, i in zip(names, indices, strict=True) if states.get(i)}


def _outline(
    binding: OptimizerBinding, whole: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Scalars as they are; for elementwise tensors their dtype. Owned matrices are left out."""
    shapes = {
        slot.name: slot.shape for group in binding.groups for slot in group if not is_owned(slot)
    }
    whole = {name: values for name, values in whole.items() if name in shapes}
    sizes = [
        (shapes[name], key, tuple(value.shape))
        for name, values in whole.items()
        for key, value in values.items()
        if isinstance(value, torch.Tensor)
    ]
    scalars = scalar_keys(sizes)
    outline: dict[str, dict[str, Any]] = {}
    for name, values in whole.items():
        for key, value in values.items():
            entry = value
            if isinstance(value, torch.Tensor):
                size = tuple(value.shape)
                if is_elementwise(shapes[name], key, size, scalars):
                    entry = value.dtype
                elif value.numel() == 1:
                    entry = value.detach().reshape(()).cpu()
                else:
                    raise ValueError(
                        f"optimizer state {key!r} of {name!r} has shape {size}, the parameter's is "
                        f"{shapes[name]}"
                    )
            outline.setdefault(name, {})[key] = entry
    return outline


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
