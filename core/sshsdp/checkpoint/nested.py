"""Optimizer state that is nested, as flat entries of a checkpoint.

Some optimizers keep lists of tensors for a parameter (Shampoo: one matrix for each dim). In a
checkpoint, each tensor is an entry of its own, and one more entry tells the structure.

Example:
    >>> entries = flatten({"step": 3, "factors": [1.0, None]})
    >>> entries
    {'step': 3, 'factors!': '["list", [0, 1]]', 'factors!0': 1.0, 'factors!1': None}
    >>> unflatten(entries)
    {'step': 3, 'factors': [1.0, None]}
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["flatten", "unflatten"]

_MARK = "!"
_KINDS: dict[str, Any] = {"list": list, "tuple": tuple}


def flatten(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with lists, tuples and dicts as a dict of leaves."""
    flat: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, (list, tuple, dict)):
            leaves: list[Any] = []
            flat[f"{key}{_MARK}"] = json.dumps(_outline(value, leaves))
            flat.update({f"{key}{_MARK}{index}": leaf for index, leaf in enumerate(leaves)})
        else:
            flat[key] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """What was flattened; leaves are the same objects."""
    state: dict[str, Any] = {}
    for key, value in flat.items():
        name, mark, index = key.partition(_MARK)
        if not mark:
            state[key] = value
        elif not index:
            state[name] = _build(json.loads(value), f"{name}{_MARK}", flat)
    return state


def _outline(value: Any, leaves: list[Any]) -> Any:
    if isinstance(value, dict):
        return ["dict", [[key, _outline(inner, leaves)] for key, inner in value.items()]]
    for kind, cls in _KINDS.items():
        if isinstance(value, cls):
            return [kind, [_outline(inner, leaves) for inner in value]]
    leaves.append(value)
    return len(leaves) - 1


def _build(outline: Any, prefix: str, flat: Mapping[str, Any]) -> Any:
    if isinstance(outline, int):
        return flat[f"{prefix}{outline}"]
    kind, parts = outline
    if kind == "dict":
        return {key: _build(inner, prefix, flat) for key, inner in parts}
    return _KINDS[kind](_build(inner, prefix, flat) for inner in parts)
