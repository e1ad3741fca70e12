"""Optimizer state under the model's names, for distributed checkpoints.

The layout is the one that ``get_state_dict`` of torch.distributed.checkpoint gives for FSDP2::

    {"state": {fqn: {"step": ..., "exp_avg": ...}}, "param_groups": [{"params": [fqn], "lr": ...}]}

Note: elementwise or not. Per parameter, an optimizer keeps tensors with one value for each element
(cut like the parameter) and values that stand for the whole parameter (``step``). The shape tells
them apart, except for a parameter of shape ``()``: there, what is a scalar for the optimizer's
other parameters is one, and so is ``step``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from sshsdp.checkpoint.model_state import chunked, empty, listed, top_level_names
from sshsdp.checkpoint.nested import flatten, unflatten
from sshsdp.optim.blocks import dense
from sshsdp.ownership.owned_space import OwnedTensor, is_owned
from sshsdp.spaces.space import space_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch.distributed.checkpoint.metadata import STORAGE_TYPES, Metadata

    from sshsdp.layout.pieces import Piece
    from sshsdp.optim.binding import OptimizerBinding
    from sshsdp.parameters.slots import ParameterSlot
    from sshsdp.spaces.space import UpdateTensor

__all__ = [
    "SavedOptimizer",
    "exact",
    "is_elementwise",
    "optimizer_state",
    "place_scalar",
    "scalar_keys",
    "take_settings",
]

logger = logging.getLogger(__name__)

Shape = tuple[int, ...]


def scalar_keys(entries: Iterable[tuple[Shape, str, Shape]]) -> set[str]:
    """State keys that hold one value per parameter.

    Args:
        entries: ``(parameter's shape, key, shape of the state tensor)``.
    """
    return {"step"} | {key for shape, key, size in entries if shape and not size}


def is_elementwise(shape: Shape, key: str, size: Shape, scalars: set[str]) -> bool:
    """Whether a state tensor of shape ``size`` has a value for each element of a parameter."""
    return size == shape and (bool(shape) or key not in scalars)


def place_scalar(value: Any, key: str, update: torch.Tensor, group: Mapping[str, Any]) -> Any:
    """A copy of a state entry that is not elementwise, where the optimizer's kernels want it.

    ``step`` stays on the host unless the group's kernels read it on the device, as in
    ``torch.optim.Optimizer.load_state_dict``.
    """
    if not isinstance(value, torch.Tensor):
        return value
    stays = key == "step" and not (group.get("capturable") or group.get("fused"))
    return value.clone() if stays else value.to(update.device, copy=True)


def take_settings(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Take saved settings into a param group. Tensors stay tensors, numbers stay numbers."""
    for key, value in saved.items():
        current = group.get(key)
        if key == "params":
            continue
        if isinstance(current, torch.Tensor):
            # Compiled optimizers read this very tensor.
            current.copy_(torch.as_tensor(value))
        elif isinstance(value, torch.Tensor):
            group[key] = value.item() if isinstance(current, (int, float)) else value.clone()
        else:
            group[key] = value


def exact(values: Mapping[str, Any]) -> str:
    """A label that is equal for equal values only."""
    return repr(
        {
            key: (value.dtype, value.tolist()) if isinstance(value, torch.Tensor) else value
            for key, value in sorted(values.items())
        }
    )


# Saving


def optimizer_state(bindings: Sequence[OptimizerBinding]) -> dict[str, Any]:
    """State and param groups of attached optimizers, by parameter name. Local.

    Raises:
        ValueError: An optimizer keeps something that is no value for the whole parameter and no
            tensor as large as it.
    """
    state: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for binding in bindings:
        cut = _Cut()
        for _, update in binding.updates():
            for key, kept in flatten(binding.optimizer.state.get(update.tensor, {})).items():
                value = dense(kept)
                if isinstance(value, torch.Tensor) and value.shape == update.tensor.shape:
                    cut.add(update, key, value)
                    continue
                whole = _whole_entry(update, key, value)
                for slot in update.slots:
                    state.setdefault(slot.name, {})[key] = whole
        for slot, key, tensor in cut.tensors():
            state.setdefault(slot.name, {})[key] = tensor
        groups += _named_groups(binding)
    return {"state": state, "param_groups": groups}


def _named_groups(binding: OptimizerBinding) -> list[dict[str, Any]]:
    named = []
    for group, slots in zip(binding.optimizer.param_groups, binding.groups, strict=True):
        settings = {key: value for key, value in group.items() if key != "params"}
        for key, value in settings.items():
            if isinstance(value, Mapping):
                raise ValueError(
                    f"setting {key!r} of a param group of {type(binding.optimizer).__name__} is a "
                    "dict, which does not come back from a distributed checkpoint: keep it in "
                    "engine.save(extra=...)"
                )
        named.append({**settings, "params": [slot.name for slot in slots]})
    return named


def _whole_entry(update: UpdateTensor, key: str, value: Any) -> Any:
    """A state entry that is not elementwise, as it is saved."""
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return value
    name = update.slots[0].name
    if not isinstance(value, torch.Tensor):
        raise ValueError(
            f"optimizer state {key!r} of {name!r} is a {type(value).__name__}: only tensors, "
            "numbers, strings, None and containers of them can be saved"
        )
    if value.numel() == 1:
        return value.detach().reshape(()).clone()
    if isinstance(update, OwnedTensor) and update.is_whole:
        return value.detach()
    raise ValueError(
        f"optimizer state {key!r} of {name!r} has shape {tuple(value.shape)}, which is neither a "
        f"scalar nor the update parameter's {tuple(update.tensor.shape)}"
    )


class _Cut:
    """Elementwise state, which parameters share in pieces."""

    def __init__(self) -> None:
        self._dtypes: dict[tuple[ParameterSlot, str], torch.dtype] = {}
        self._pieces: dict[tuple[ParameterSlot, str], list[tuple[Piece, torch.Tensor]]] = {}

    def add(self, update: UpdateTensor, key: str, value: torch.Tensor) -> None:
        """Note an entry that has the shape of its update tensor."""
        by_name = {slot.name: slot for slot in update.slots}
        for slot in update.slots:
            self._dtypes[slot, key] = value.dtype
            self._pieces.setdefault((slot, key), [])
        flat = value.reshape(-1)
        for piece in space_of(update.slots[0]).pieces_of(update):
            data = flat[piece.offset : piece.offset + piece.numel]
            self._pieces[by_name[piece.name], key].append((piece, data))

    def tensors(self) -> Iterator[tuple[ParameterSlot, str, torch.Tensor]]:
        """What this rank has of each parameter's entries."""
        for (slot, key), pieces in self._pieces.items():
            yield slot, key, chunked(slot, self._dtypes[slot, key], pieces)


# Loading


@dataclass(frozen=True)
class SavedOptimizer:
    """What a checkpoint holds for some attached optimizers.

    Made and checked from the checkpoint's metadata alone. Then, in this order: read `scalars`,
    give them to `restore`, and read what that returns.

    Attributes:
        bindings: The attached optimizers, in the order in which they were saved.
        state: ``{slot: (name it was saved under, {key: metadata})}`` of the trained parameters.
        settings: For each param group, ``{key: metadata}``.
    """

    bindings: list[OptimizerBinding]
    state: dict[ParameterSlot, tuple[str, dict[str, STORAGE_TYPES]]]
    settings: list[dict[str, STORAGE_TYPES]]

    @classmethod
    def find(
        cls, bindings: Sequence[OptimizerBinding], metadata: Metadata, prefix: str
    ) -> SavedOptimizer:
        """Look optimizers up in a checkpoint.

        Args:
            bindings: The attached optimizers.
            metadata: Of the checkpoint.
            prefix: Under which they were saved, such as ``"optimizer"``.

        Raises:
            ValueError: There are none, they have another number of param groups, or a shape
                differs.
        """
        start = f"{prefix}."
        entries = {
            key.removeprefix(start): entry
            for key, entry in metadata.state_dict_metadata.items()
            if key.startswith(start)
        }
        if not entries:
            raise ValueError(
                f"engine.load(): the checkpoint holds no optimizer under {prefix!r} (it has "
                f"{listed(top_level_names(metadata))}): load without an optimizer reads the model "
                "alone"
            )
        settings = _saved_settings(entries)
        num_groups = sum(len(binding.groups) for binding in bindings)
        if len(settings) != num_groups:
            raise ValueError(
                f"engine.load(): the checkpoint has {len(settings)} param groups under {prefix!r}, "
                f"the optimizers given have {num_groups}: give the same optimizers as to the save, "
                "in the same order"
            )
        found = cls(list(bindings), _saved_state(entries, bindings), settings)
        found._check_shapes()
        return found

    @property
    def _scalar_keys(self) -> set[str]:
        return scalar_keys(
            (slot.shape, key, tuple(entry.size))
            for slot, (_, entries) in self.state.items()
            for key, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        )

    def _split(self) -> Iterator[tuple[ParameterSlot, str, STORAGE_TYPES, bool]]:
        """Every state entry, and whether it is elementwise."""
        known = self._scalar_keys
        for slot, (_, entries) in self.state.items():
            for key, entry in entries.items():
                is_cut = isinstance(entry, TensorStorageMetadata) and is_elementwise(
                    slot.shape, key, tuple(entry.size), known
                )
                yield slot, key, entry, is_cut

    def _check_shapes(self) -> None:
        for slot, key, entry, is_cut in self._split():
            if math.prod(_size(entry)) != 1 and not is_cut and not is_owned(slot):
                raise ValueError(
                    f"engine.load(): optimizer state {key!r} of {slot.name!r} has shape "
                    f"{_size(entry)} in the checkpoint, the parameter's is {slot.shape}"
                )

    def scalars(self) -> dict[str, Any]:
        """What to read first: the state that is not elementwise, and the param groups."""
        state: dict[str, dict[str, Any]] = {}
        elsewhere = {slot for slot in self.state if is_owned(slot)} - {
            slot for b in self.bindings for _, update in b.updates() for slot in update.slots
        }
        for slot, key, entry, is_cut in self._split():
            # What belongs to a whole matrix may be large.
            if not is_cut and slot not in elsewhere:
                state.setdefault(self.state[slot][0], {})[key] = empty(entry)
        groups = [{key: empty(entry) for key, entry in one.items()} for one in self.settings]
        return {"state": state, "param_groups": groups}

    def restore(self, scalars: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Take the scalars and the param groups, and make room for the rest.

        Args:
            scalars: `scalars`' dict, read. The optimizers' state is replaced.

        Returns:
            ``{fqn: {key: tensor}}`` over the new state, to be read now.

        Raises:
            ValueError: The param groups hold other parameters; nothing was changed then.
        """
        groups: list[Mapping[str, Any]] = scalars["param_groups"]
        members = [slots for binding in self.bindings for slots in binding.groups]
        for index, (saved, slots) in enumerate(zip(groups, members, strict=True)):
            _check_members(index, saved, slots)
        with torch.no_grad():
            live = [group for b in self.bindings for group in b.optimizer.param_groups]
            for group, saved in zip(live, groups, strict=True):
                take_settings(group, saved)
        cut = {
            (slot, key): entry.properties.dtype
            for slot, key, entry, is_cut in self._split()
            if is_cut and isinstance(entry, TensorStorageMetadata)
        }
        whole = {slot: scalars["state"].get(name, {}) for slot, (name, _) in self.state.items()}
        room: dict[str, dict[str, Any]] = {}
        for binding in self.bindings:
            self._restore_one(binding, cut, whole, room)
        return room

    def _restore_one(
        self,
        binding: OptimizerBinding,
        cut: Mapping[tuple[ParameterSlot, str], torch.dtype],
        whole: Mapping[ParameterSlot, Mapping[str, Any]],
        room: dict[str, dict[str, Any]],
    ) -> None:
        def label(slot: ParameterSlot) -> object:
            # Parameters that share an update parameter must share what is not elementwise.
            keys = sorted(self.state[slot][1]) if slot in self.state else []
            return keys, exact(whole.get(slot, {}))

        binding.separate(label)
        binding.optimizer.state.clear()
        to_read = _Cut()
        for index, update in binding.updates():
            first = update.slots[0]
            values: dict[str, Any] = {}
            for key in self.state[first][1] if first in self.state else ():
                if (first, key) in cut:
                    values[key] = torch.zeros_like(
                        update.tensor, dtype=cut[first, key], requires_grad=False
                    )
                    to_read.add(update, key, values[key])
                else:
                    group = binding.optimizer.param_groups[index]
                    values[key] = place_scalar(whole[first][key], key, update.tensor, group)
            if values:
                binding.optimizer.state[update.tensor] = unflatten(values)
        for slot, key, tensor in to_read.tensors():
            room.setdefault(self.state[slot][0], {})[key] = tensor


def _saved_settings(entries: Mapping[str, STORAGE_TYPES]) -> list[dict[str, STORAGE_TYPES]]:
    start = "param_groups."
    found: dict[int, dict[str, STORAGE_TYPES]] = {}
    for full, entry in entries.items():
        if full.startswith(start):
            index, _, key = full.removeprefix(start).partition(".")
            if not index.isdecimal():
                raise ValueError(
                    "engine.load(): the optimizer was saved with "
                    "StateDictOptions(flatten_optimizer_state_dict=True), which keeps no param "
                    "groups: save it without"
                )
            found.setdefault(int(index), {})[key] = entry
    return [found.get(index, {}) for index in range(max(found, default=-1) + 1)]


def _saved_state(
    entries: Mapping[str, STORAGE_TYPES], bindings: Iterable[OptimizerBinding]
) -> dict[ParameterSlot, tuple[str, dict[str, STORAGE_TYPES]]]:
    slots = [s for b in bindings for group in b.groups for s in group if s.space.trainable]
    by_name = {alias: slot for slot in slots for alias in slot.aliases}
    found: dict[ParameterSlot, tuple[str, dict[str, STORAGE_TYPES]]] = {}
    unused: dict[str, None] = {}
    for full, entry in entries.items():
        name, _, key = full.removeprefix("state.").rpartition(".")
        if full.startswith("state."):
            if name in by_name:
                found.setdefault(by_name[name], (name, {}))[1][key] = entry
            else:
                unused[name] = None
    if unused and (not dist.is_initialized() or dist.get_rank() == 0):
        logger.warning(
            "engine.load(): the checkpoint's optimizer state of %s is not read: these parameters "
            "are frozen or are not in the optimizer",
            listed(unused),
        )
    return found


def _size(entry: STORAGE_TYPES) -> Shape:
    return tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else ()


def _check_members(index: int, saved: Mapping[str, Any], slots: Sequence[ParameterSlot]) -> None:
    aliases = {alias for slot in slots for alias in slot.aliases}
    names = set(saved.get("params", aliases))
    # Frozen parameters may be in a group or not: they have no state.
    lacking = [
        slot.name for slot in slots if slot.space.trainable and not names.intersection(slot.aliases)
    ]
    foreign = sorted(names - aliases)
    if lacking or foreign:
        raise ValueError(
            f"engine.load(): param group {index} has other parameters in the checkpoint than in "
            f"the optimizer: {listed([*lacking, *foreign])}"
        )
