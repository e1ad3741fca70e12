"""Which parameters hold several matrices: what the user says, and what their structure tells."""

from __future__ import annotations

import logging
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn

from sshsdp.assembly.names import named_modules
from sshsdp.assembly.patterns import check_patterns
from sshsdp.layout.optimization_units import OptimizationUnit, Split, optimization_units

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sshsdp.parameters.slots import ParameterSlot

__all__ = ["default_split", "resolve_splits"]

logger = logging.getLogger(__name__)

_QKV = ("q", "k", "v")
_GATE_UP = ("gate", "up")


def resolve_splits(
    splits: Mapping[str, Split], model: nn.Module, slots: Sequence[ParameterSlot]
) -> dict[ParameterSlot, tuple[OptimizationUnit, ...]]:
    """The optimization units of every parameter.

    Args:
        splits: Pattern to split, the first match wins; the rest takes `default_split`.
        model: The model that the slots belong to.
        slots: Its parameters.

    Raises:
        ValueError: A pattern matches nothing; a parameter that is named exactly cannot be cut so;
            two names of a tied parameter ask for different splits.
    """
    names = [alias for slot in slots for alias in slot.aliases]
    check_patterns(splits, names, "splits")
    modules = dict(named_modules(model))
    return {slot: _units(slot, splits, modules) for slot in slots}


def _units(
    slot: ParameterSlot, splits: Mapping[str, Split], modules: Mapping[str, nn.Module]
) -> tuple[OptimizationUnit, ...]:
    matches = {
        alias: next((p for p in splits if fnmatchcase(alias, p)), None) for alias in slot.aliases
    }
    patterns = [pattern for pattern in dict.fromkeys(matches.values()) if pattern is not None]
    if len({splits[pattern] for pattern in patterns}) > 1:
        raise ValueError(
            f"splits: the tied parameter {slot.name!r} is cut in different ways under its names: "
            + ", ".join(f"{a!r} by {p!r}" for a, p in matches.items() if p is not None)
        )
    if not patterns:
        return optimization_units(slot.name, slot.shape, default_split(slot, modules))
    try:
        return optimization_units(slot.name, slot.shape, splits[patterns[0]])
    except ValueError as error:
        if patterns[0] in slot.aliases:
            raise ValueError(f"splits: {error}") from error
        logger.warning("splits[%r] leaves %r whole: %s", patterns[0], slot.name, error)
        return optimization_units(slot.name, slot.shape, Split.whole())


def default_split(slot: ParameterSlot, modules: Mapping[str, nn.Module]) -> Split:
    """What the structure of the model tells of a parameter.

    * ``[E, out, in]`` that is no convolution: one unit for each expert, and gate and up apart where
      the shapes show that they lie one behind the other;
    * ``gate_up_proj``: gate and up; ``qkv_proj``, ``Wqkv``, ``c_attn`` and
      ``nn.MultiheadAttention``: query, key and value, if sizes that the module or its config tells
      add up;
    * a convolution: ``[out, in * kernel]``;
    * everything else, layouts that interleave their parts included: whole.
    """
    module, attribute = slot.holders[0]
    if isinstance(module, nn.modules.conv._ConvNd) and len(slot.shape) > 1:
        return Split.flattened()
    if len(slot.shape) == 3:
        return Split.experts(_gate_up_of_experts(module, attribute, slot.shape))
    if len(slot.shape) != 2:
        return Split.whole()
    name = slot.name.removesuffix(".weight") if attribute == "weight" else slot.name
    owner, _, kind = name.rpartition(".")
    if kind == "gate_up_proj" and slot.shape[0] % 2 == 0:
        return Split.equal(2, names=_GATE_UP)
    if kind in ("qkv_proj", "Wqkv", "c_attn", "in_proj_weight"):
        return _query_key_value(modules.get(owner), slot.shape)
    return Split.whole()


def _gate_up_of_experts(module: nn.Module, attribute: str, shape: tuple[int, ...]) -> Split | None:
    down = getattr(module, "down_proj", None)
    if attribute != "gate_up_proj" or not isinstance(down, nn.Parameter) or down.ndim != 3:
        return None
    # [E, 2 * I, H] beside [E, H, I]: one behind the other. Other layouts may interleave.
    is_stacked = shape[1:] == (2 * down.shape[2], down.shape[1])
    return Split.equal(2, names=_GATE_UP) if is_stacked else None


def _query_key_value(attention: nn.Module | None, shape: tuple[int, ...]) -> Split:
    config: Any = getattr(attention, "config", None)
    for dim in (0, 1):
        if shape[dim] == 3 * shape[1 - dim]:
            return Split.equal(3, dim=dim, names=_QKV)
    heads = getattr(config, "num_attention_heads", None)
    groups = getattr(config, "num_key_value_heads", None)
    width = getattr(attention, "head_dim", None)
    if isinstance(heads, int) and isinstance(groups, int) and isinstance(width, int):
        sizes = (heads * width, groups * width, groups * width)
        if sum(sizes) == shape[0]:
            return Split.sizes(*sizes, names=_QKV)
    return Split.whole()
