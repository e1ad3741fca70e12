"""An engine's model and optimizer state under the model's names, for distributed checkpoints.

The layout is the one that ``get_state_dict`` of torch.distributed.checkpoint gives for FSDP2::

    model:      {fqn: tensor}
    optimizer:  {"state": {fqn: {"step": ..., "exp_avg": ...}}, "param_groups": [{"params": [fqn]}]}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from sshsdp.checkpoint.chunks import ChunkedTensor
from sshsdp.engine.whole import state_entries

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn
    from torch.distributed.checkpoint.metadata import Metadata

    from sshsdp.engine.slots import ParameterSlot
    from sshsdp.engine.space import ShardedSpace, UpdateTensor
    from sshsdp.layout.pieces import Piece
    from sshsdp.optim.binding import OptimizerBinding

__all__ = [
    "check_against",
    "model_state",
    "optimizer_state",
    "optimizer_template",
    "restore_optimizer",
]


def model_state(model: nn.Module, spaces: Sequence[ShardedSpace]) -> dict[str, Any]:
    """The model's state dict: chunked masters (or frozen runtime parameters) and whole buffers.

    Loading into it writes the update shards; publish afterwards.
    """
    tensors: dict[str, torch.Tensor] = {}
    for space in spaces:
        held: dict[str, list[tuple[Piece, torch.Tensor]]] = {slot.name: [] for slot in space.slots}
        for piece, data in space.update_pieces() if space.trainable else space.runtime_pieces():
            held[piece.name].append((piece, data))
        for slot in space.slots:
            tensor = _chunked(slot, space.update_dtype, held[slot.name])
            tensors.update(dict.fromkeys(slot.aliases, tensor))
    return {
        key: tensors[key] if is_parameter else module._buffers[attribute]
        for key, module, attribute, is_parameter in state_entries(model)
    }


def _chunked(
    slot: ParameterSlot, dtype: torch.dtype, pieces: list[tuple[Piece, torch.Tensor]]
) -> torch.Tensor:
    if 0 in slot.shape:
        # No rank holds a piece of it, and a checkpoint without its name could not be loaded.
        return torch.empty(slot.shape, dtype=dtype)
    return ChunkedTensor(slot.shape, dtype, pieces)


def optimizer_state(binding: OptimizerBinding) -> dict[str, Any]:
    """State and param groups of an attached optimizer, by parameter name.

    Raises:
        ValueError: The optimizer keeps a tensor that is neither a scalar nor as large as its
            parameter.
    """
    state: dict[str, dict[str, Any]] = {}
    for _, update in binding.updates():
        values = binding.optimizer.state.get(update.tensor, {})
        for key, value in values.items():
            per_parameter = _spread(update, key, value)
            for slot in update.slots:
                state.setdefault(slot.name, {})[key] = per_parameter(slot)
    return {"state": state, "param_groups": _named_groups(binding)}


def _named_groups(binding: OptimizerBinding) -> list[dict[str, Any]]:
    return [
        {**{k: v for k, v in group.items() if k != "params"}, "params": [s.name for s in slots]}
        for group, slots in zip(binding.optimizer.param_groups, binding.groups, strict=True)
    ]


def _spread(update: UpdateTensor, key: str, value: Any) -> Any:
    """A function from a slot to its part of one state entry."""
    if not isinstance(value, torch.Tensor):
        return lambda slot: value
    if value.shape == update.tensor.shape:
        pieces = list(_pieces(update, value))
        return lambda slot: _chunked(
            slot, value.dtype, [(p, data) for p, data in pieces if p.name == slot.name]
        )
    if value.numel() == 1:
        return lambda slot: value.detach().reshape(()).clone()
    raise ValueError(
        f"optimizer state {key!r} of {update.slots[0].name!r} has shape {tuple(value.shape)}, "
        "which "
        f"is neither a scalar nor the flat update parameter's {tuple(update.tensor.shape)}"
    )


def _pieces(update: UpdateTensor, flat: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
    space = update.slots[0].space
    start = space.update_range[0] + update.start
    for piece in space.layout.pieces(start, start + flat.numel()):
        yield piece, flat[piece.offset : piece.offset + piece.numel]


def optimizer_template(
    binding: OptimizerBinding, metadata: Metadata, prefix: str
) -> dict[str, Any]:
    """What to read first: scalars of the state, and the param groups.

    Args:
        binding: The attached optimizer.
        metadata: Of the checkpoint.
        prefix: Under which the optimizer was saved, such as ``"optimizer"``.
    """
    state: dict[str, dict[str, Any]] = {}
    for name, keys in _saved_keys(binding, metadata, prefix).items():
        for key, entry in keys.items():
            if not isinstance(entry, TensorStorageMetadata):
                state.setdefault(name, {})[key] = None
            elif not entry.size:
                state.setdefault(name, {})[key] = torch.empty((), dtype=entry.properties.dtype)
    return {"state": state, "param_groups": _group_templates(binding, metadata, prefix)}


def _group_templates(
    binding: OptimizerBinding, metadata: Metadata, prefix: str
) -> list[dict[str, Any]]:
    """One dict for each param group, with the keys that were saved for the group of that place."""
    start = f"{prefix}.param_groups."
    saved: dict[int, list[str]] = {}
    for full in metadata.state_dict_metadata:
        if full.startswith(start):
            index, _, key = full.removeprefix(start).partition(".")
            saved.setdefault(int(index), []).append(key)
    groups = _named_groups(binding)
    return [
        {key: group.get(key) for key in saved.get(index, [])} for index, group in enumerate(groups)
    ]


def _saved_keys(
    binding: OptimizerBinding, metadata: Metadata, prefix: str
) -> dict[str, dict[str, Any]]:
    names = {slot.name for group in binding.groups for slot in group}
    found: dict[str, dict[str, Any]] = {}
    start = f"{prefix}.state."
    for full, entry in metadata.state_dict_metadata.items():
        name, _, key = full.removeprefix(start).rpartition(".")
        if full.startswith(start) and name in names:
            found.setdefault(name, {})[key] = entry
    return found


def restore_optimizer(
    binding: OptimizerBinding, metadata: Metadata, prefix: str, loaded: Mapping[str, Any]
) -> dict[str, Any]:
    """Take the scalars and groups that were read, and make room for the rest.

    Args:
        binding: The attached optimizer; its state is replaced.
        metadata: Of the checkpoint.
        prefix: Under which the optimizer was saved.
        loaded: `optimizer_template`'s dict, read.

    Returns:
        The dict to read now: ``{"state": {fqn: {key: ChunkedTensor}}}`` over the new state.
    """
    _check_groups(binding, loaded["param_groups"])
    for group, saved in zip(binding.optimizer.param_groups, loaded["param_groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
    keys = _saved_keys(binding, metadata, prefix)
    scalars: Mapping[str, Mapping[str, Any]] = loaded["state"]

    def label(slot: ParameterSlot) -> str:
        # Parameters that share an update parameter must share what is not elementwise.
        return repr((sorted(keys.get(slot.name, ())), scalars.get(slot.name)))

    binding.separate(label)
    binding.optimizer.state.clear()
    state: dict[str, dict[str, Any]] = {}
    for _, update in binding.updates():
        first = update.slots[0].name
        for key, entry in keys.get(first, {}).items():
            if key in scalars.get(first, {}):
                value = scalars[first][key]
            else:
                value = torch.zeros_like(
                    update.tensor, dtype=entry.properties.dtype, requires_grad=False
                )
                spread = _spread(update, key, value)
                for slot in update.slots:
                    state.setdefault(slot.name, {})[key] = spread(slot)
            binding.optimizer.state[update.tensor][key] = value
    return {"state": state}


def _check_groups(binding: OptimizerBinding, saved: Sequence[Mapping[str, Any]]) -> None:
    for index, (group, slots) in enumerate(zip(saved, binding.groups, strict=True)):
        names = {slot.name for slot in slots}
        aliases = {alias for slot in slots for alias in slot.aliases}
        # Frozen parameters may be in a group or not: they have no state.
        trained = {slot.name for slot in slots if slot.space.trainable}
        found = set(group.get("params", names))
        if not trained <= found or not found <= aliases:
            differing = sorted((trained - found) | (found - aliases))
            raise ValueError(
                f"engine.load(): param group {index} has other parameters in the checkpoint than "
                "in "
                f"the optimizer: {', '.join(differing[:5])}"
            )


def check_against(
    template: Mapping[str, Any], metadata: Metadata, prefix: str, *, strict: bool
) -> tuple[list[str], list[str]]:
    """Compare a model template with a checkpoint before anything is read.

    Returns:
        Missing names, which must be left out of the template, and unexpected ones.

    Raises:
        ValueError: Names differ and ``strict``; a shape differs; a floating dtype would be
            narrowed.
    """
    saved = {
        key.removeprefix(f"{prefix}."): entry
        for key, entry in metadata.state_dict_metadata.items()
        if key.startswith(f"{prefix}.")
    }
    missing = [name for name in template if name not in saved]
    unexpected = [name for name in saved if name not in template]
    problems = []
    for name, tensor in template.items():
        entry = saved.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            continue
        if tuple(entry.size) != tuple(tensor.shape):
            problems.append(
                f"{name!r} has shape {tuple(entry.size)} in the checkpoint, the model's is "
                f"{tuple(tensor.shape)}"
            )
        dtype = entry.properties.dtype
        if dtype.is_floating_point and torch.promote_types(dtype, tensor.dtype) != tensor.dtype:
            problems.append(
                f"{name!r} is {dtype} in the checkpoint and would be rounded to {tensor.dtype}: "
                f"keep masters in UpdatePolicy(dtype={dtype})"
            )
    if strict and missing:
        problems.append(f"missing in the checkpoint: {', '.join(missing)}")
    if strict and unexpected:
        problems.append(f"unexpected in the checkpoint: {', '.join(unexpected)}")
    if problems:
        raise ValueError("engine.load(): " + "; ".join(problems))
    return missing, unexpected
