"""An engine's model under its own names, for distributed checkpoints: ``{fqn: tensor}``.

Note: extra state. What modules return from ``get_extra_state`` is in the state dict as well, as in
FSDP2's. It may be anything; distributed checkpoints store a dict of it as several entries. So it is
not read into what the model has, whose shapes may differ, but into what the metadata describe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from sshsdp.checkpoint.chunks import ChunkedTensor
from sshsdp.checkpoint.state_entries import EXTRA_STATE, StateKind, state_entries

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn
    from torch.distributed.checkpoint.metadata import STORAGE_TYPES, Metadata

    from sshsdp.layout.pieces import Piece
    from sshsdp.parameters.slots import ParameterSlot
    from sshsdp.spaces.space import ShardedSpace

__all__ = [
    "check_against",
    "chunked",
    "empty",
    "listed",
    "model_state",
    "present",
    "template",
    "top_level_names",
]


def model_state(
    model: nn.Module,
    spaces: Sequence[ShardedSpace],
    shards: Sequence[torch.Tensor] | None = None,
) -> dict[str, Any]:
    """The model's state dict: chunked masters (or frozen runtime parameters) and whole buffers.

    Loading into it writes the update shards; publish afterwards. Extra states are as the modules
    give them.

    Args:
        model: The sharded model.
        spaces: Its address spaces.
        shards: Values to take instead of the update shards of the trainable spaces.
    """
    tensors: dict[str, torch.Tensor] = {}
    given = iter(shards) if shards is not None else None
    for space in spaces:
        held: dict[str, list[tuple[Piece, torch.Tensor]]] = {slot.name: [] for slot in space.slots}
        if space.trainable:
            pieces = space.update_pieces(None if given is None else next(given))
        else:
            pieces = space.runtime_pieces()
        for piece, data in pieces:
            held[piece.name].append((piece, data))
        for slot in space.slots:
            tensor = chunked(slot, space.update_dtype, held[slot.name])
            tensors.update(dict.fromkeys(slot.aliases, tensor))
    return {
        key: tensors[key] if kind is StateKind.PARAMETER else kind.read(module, attribute)
        for key, module, attribute, kind in state_entries(model)
    }


def chunked(
    slot: ParameterSlot, dtype: torch.dtype, pieces: list[tuple[Piece, torch.Tensor]]
) -> torch.Tensor:
    """A tensor of a parameter's shape, of which this rank holds some pieces."""
    if 0 in slot.shape:
        # No rank holds a piece of it, and a checkpoint without its name could not be loaded.
        return torch.empty(slot.shape, dtype=dtype)
    return ChunkedTensor(slot.shape, dtype, pieces)


def check_against(
    state: Mapping[str, Any],
    metadata: Metadata,
    prefix: str,
    *,
    strict: bool,
    spaces: Sequence[ShardedSpace],
) -> tuple[list[str], list[str]]:
    """Compare a model's state with a checkpoint before anything is read.

    Args:
        state: What `model_state` gave.
        metadata: Of the checkpoint.
        prefix: Under which the model was saved, such as ``"model"``.
        strict: Refuse missing and unexpected names.
        spaces: The model's address spaces.

    Returns:
        Missing names (tied ones count if none of them is there), and unexpected ones.

    Raises:
        ValueError: Names differ and ``strict``; a shape differs; a dtype would be narrowed.
    """
    saved = _entries(metadata, prefix)
    if not saved:
        raise ValueError(
            f"engine.load(): the checkpoint holds nothing under {prefix!r}; it has "
            f"{listed(top_level_names(metadata))}"
        )
    tensors = {name: value for name, value in state.items() if not _is_extra(name)}
    # Tied names share one tensor, and any of them brings its values.
    found = {id(tensor) for name, tensor in tensors.items() if name in saved}
    missing = [
        name
        for name, value in state.items()
        if not (
            id(value) in found
            if name in tensors
            # Nothing at all is stored of an empty dict.
            else name in saved or (isinstance(value, Mapping) and not value)
        )
    ]
    unexpected = [name for name in saved if name not in state]
    original = {
        alias: slot.original_dtype
        for space in spaces
        for slot in space.slots
        for alias in slot.aliases
        if not space.trainable
    }
    problems = [
        problem
        for name, tensor in tensors.items()
        if name in saved and (problem := _mismatch(name, tensor, saved[name], original.get(name)))
    ]
    if strict and missing:
        problems.append(f"missing in the checkpoint: {listed(missing)}")
    if strict and unexpected:
        problems.append(f"unexpected in the checkpoint: {listed(unexpected)}")
    if problems:
        raise ValueError("engine.load(): " + "; ".join(problems))
    return missing, unexpected


def present(state: Mapping[str, Any], metadata: Metadata, prefix: str) -> dict[str, Any]:
    """The part of a model's state that a checkpoint has, to read into."""
    saved = _entries(metadata, prefix)
    extras = [name for name in state if _is_extra(name) and name in saved]
    room = template(metadata, prefix, extras) if extras else {}
    return {
        name: room[name] if name in room else value
        for name, value in state.items()
        if name in saved
    }


def template(metadata: Metadata, prefix: str, names: Iterable[str] | None = None) -> dict[str, Any]:
    """What was saved under a prefix, nested as it was, with tensors and None to read into.

    Args:
        metadata: Of the checkpoint.
        prefix: A top-level name.
        names: Only these names below it; None: all.
    """
    wanted = None if names is None else set(names)
    root: dict[str, Any] = {prefix: {}}
    for key, entry in metadata.state_dict_metadata.items():
        path = _path(metadata, key, prefix)
        if path is not None and (wanted is None or path[1] in wanted):
            set_element(root, path, empty(entry))
    found: dict[str, Any] = root[prefix]
    return found


def empty(entry: STORAGE_TYPES) -> Any:
    """Something to read an entry into."""
    if isinstance(entry, TensorStorageMetadata):
        return torch.empty(entry.size, dtype=entry.properties.dtype)
    return None


def _entries(metadata: Metadata, prefix: str) -> dict[str, STORAGE_TYPES]:
    """The entries below a prefix by name; of an extra state that has several, the first."""
    found: dict[str, STORAGE_TYPES] = {}
    for key, entry in metadata.state_dict_metadata.items():
        path = _path(metadata, key, prefix)
        if path is not None:
            found.setdefault(path[1], entry)
    return found


def _path(metadata: Metadata, key: str, prefix: str) -> tuple[Any, ...] | None:
    """``(prefix, name, ...)`` of a flattened key, or None if it is not below the prefix."""
    path = (metadata.planner_data or {}).get(key)
    if path is None and key.startswith(f"{prefix}."):
        path = (prefix, key.removeprefix(f"{prefix}."))
    return tuple(path) if path is not None and len(path) > 1 and path[0] == prefix else None


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == EXTRA_STATE


def listed(names: Iterable[str], most: int = 10) -> str:
    """Names for a message, cut short if there are many."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def top_level_names(metadata: Metadata) -> list[str]:
    """Names under which things were saved, in order."""
    return list(dict.fromkeys(key.partition(".")[0] for key in metadata.state_dict_metadata))


def _mismatch(
    name: str, tensor: torch.Tensor, entry: STORAGE_TYPES, original_dtype: torch.dtype | None
) -> str | None:
    if not isinstance(entry, TensorStorageMetadata):
        return f"{name!r} is no tensor in the checkpoint"
    if tuple(entry.size) != tuple(tensor.shape):
        return (
            f"{name!r} has shape {tuple(entry.size)} in the checkpoint, the model's is "
            f"{tuple(tensor.shape)}"
        )
    dtype = entry.properties.dtype
    # Frozen parameters have no masters: `sshsdp.shard` rounds their values in the same way.
    if dtype == original_dtype or not _narrows(dtype, tensor.dtype):
        return None
    is_master = isinstance(tensor, ChunkedTensor) and original_dtype is None
    return f"{name!r} is {dtype} in the checkpoint and would be rounded to {tensor.dtype}: " + (
        f"keep masters in UpdatePolicy(dtype={dtype})"
        if is_master
        else f"convert it to {dtype} in the model before sshsdp.shard()"
    )


def _narrows(saved: torch.dtype, target: torch.dtype) -> bool:
    if saved == target:
        return False
    try:
        return torch.promote_types(saved, target) != target
    except RuntimeError:
        # torch does not relate some dtypes (float8, unsigned integers) to others.
        return True
