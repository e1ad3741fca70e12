"""Counting the bytes that copy-like operators write."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sshsdp.comm.collectives import Collectives

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CopyCounter", "count_copies"]

_NAMES = (
    "copy_",
    "_to_copy",
    "clone",
    "cat",
    "stack",
    "index_select",
    "gather",
    "repeat",
    "constant_pad_nd",
    "narrow_copy",
    "slice_copy",
    "split_copy",
    "split_with_sizes_copy",
    "unbind_copy",
    "view_copy",
    "as_strided_copy",
    "_chunk_cat",
    "_foreach_copy_",
    # FSDP2's own operators, whose insides no dispatch mode sees.
    "all_gather_copy_in",
    "chunk_cat",
)


class CopyCounter(TorchDispatchMode):
    """Adds up what copy-like operators write.

    Attributes:
        nbytes: Bytes written, those of ``own_slot_nbytes`` left out.
        own_slot_nbytes: Bytes that an all-gather built of sends wrote into this rank's own slot of
            its output: part of the collective, and done inside of the backend's own all-gathers.
        by_operator: ``nbytes``, by name of the operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self.own_slot_nbytes = 0
        self.by_operator: dict[str, int] = {}
        self._in_collective = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _NAMES:
            nbytes = _written(name, args, kwargs or {}, result)
            if self._in_collective:
                self.own_slot_nbytes += nbytes
            else:
                self.nbytes += nbytes
                self.by_operator[name] = self.by_operator.get(name, 0) + nbytes
        return result

    @contextlib.contextmanager
    def inside_collective(self) -> Iterator[None]:
        """Count what follows as done by a collective."""
        self._in_collective = True
        try:
            yield
        finally:
            self._in_collective = False


@contextlib.contextmanager
def count_copies() -> Iterator[CopyCounter]:
    """Count in the calling thread, which on CPU runs backward too."""
    counter = CopyCounter()
    all_gather = Collectives.all_gather_together

    def counted(self: Collectives, *args: Any, **kwargs: Any) -> Any:
        with counter.inside_collective():
            return all_gather(self, *args, **kwargs)

    Collectives.all_gather_together = counted  # type: ignore[method-assign]
    try:
        with counter:
            yield counter
    finally:
        Collectives.all_gather_together = all_gather  # type: ignore[method-assign]


def _written(name: str, args: Any, kwargs: Any, result: Any) -> int:
    if name == "all_gather_copy_in":
        return _nbytes(args[0])
    if "out" in kwargs:
        return _nbytes(kwargs["out"])
    return _nbytes(args[0] if name == "_foreach_copy_" else result)


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(_nbytes(item) for item in value) if isinstance(value, (list, tuple)) else 0
