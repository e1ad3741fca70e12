"""Counting the bytes that copy-like operators write."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_COPY_LIKE = {
    _aten.copy_.default,
    _aten.clone.default,
    _aten._to_copy.default,
    _aten.cat.default,
    _aten.cat.out,
    _aten.stack.default,
    _aten._chunk_cat.default,
    _aten._chunk_cat.out,
    _aten.split_with_sizes_copy.default,
    _aten.split_with_sizes_copy.out,
    _aten.index_select.default,
    _aten._foreach_copy_.default,
}


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(_nbytes(item) for item in value) if isinstance(value, (list, tuple)) else 0


def _written(func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    if "out" in kwargs:
        return kwargs["out"]
    if func.namespace == "fsdp":
        # FSDP2's copy-in returns its own slot of the gather output, and the whole output.
        return result[0] if func.__name__.startswith("all_gather_copy_in") else None
    return args[0] if func is _aten._foreach_copy_.default else result


class CopyCounter(TorchDispatchMode):
    """Adds up what copy-like operators write, as long as it writes ``at_least`` bytes at a time."""

    def __init__(self, at_least: int = 0) -> None:
        super().__init__()
        self.nbytes = 0
        self._at_least = at_least

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _COPY_LIKE or func.namespace == "fsdp":
            nbytes = _nbytes(_written(func, args, kwargs or {}, result))
            if nbytes >= self._at_least:
                self.nbytes += nbytes
        return result
