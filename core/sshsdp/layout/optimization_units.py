"""Optimization units: what a matrix optimizer takes for one matrix.

A model may keep several matrices in one parameter: the experts of a layer in ``[E, out, in]``,
query, key and value in one projection. A `Split` says so; units are boxes of the parameter, and
together they cover it.

Example:
    >>> split = Split.experts(Split.equal(2, names=("gate", "up")))
    >>> [unit.name for unit in optimization_units("gate_up", (2, 6, 4), split)]
    ['gate_up[0][gate]', 'gate_up[0][up]', 'gate_up[1][gate]', 'gate_up[1][up]']
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

__all__ = ["OptimizationUnit", "Split", "optimization_units"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizationUnit:
    """A box of a parameter that an optimizer sees as one tensor.

    Attributes:
        name: The parameter's FQN, with ``[part]`` for every cut.
        parameter: The parameter's FQN.
        offsets: First index in every dim of the parameter.
        sizes: Extent in every dim of the parameter.
        shape: Shape that the optimizer sees: ``sizes`` without the expert dim, or flattened.
    """

    name: str
    parameter: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The unit inside a tensor of the parameter's shape.

        A view where the tensor's strides allow it, else a copy.
        """
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            tensor = tensor.narrow(dim, offset, size)
        return tensor.reshape(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How a parameter is cut into optimization units. Use the class methods.

    Attributes:
        per_index: Every index of dim 0 is a unit of its own, without that dim.
        dim: The dim that is cut into parts, counted in what ``per_index`` leaves.
        parts: Extents of the parts along ``dim``; an int: so many equal parts; None: no cut.
        names: Names of the parts; default: their numbers.
        is_flattened: Units are seen as ``[first dim, all other dims]``.
    """

    per_index: bool = False
    dim: int = 0
    parts: tuple[int, ...] | int | None = None
    names: tuple[str, ...] | None = None
    is_flattened: bool = False

    def __post_init__(self) -> None:
        """Refuse parts that are no parts.

        Raises:
            ValueError: A part below 1, or not as many names as parts.
        """
        parts = self.parts if isinstance(self.parts, tuple) else (self.parts or 1,)
        if not parts or any(part < 1 for part in parts) or self.parts == 0:
            raise ValueError(f"parts of a Split must be 1 or more, got {self.parts}")
        if self.names is not None and len(self.names) != self.num_parts:
            raise ValueError(f"a Split into {self.num_parts} parts has the names {self.names}")

    @property
    def num_parts(self) -> int:
        """Parts along ``dim``."""
        return len(self.parts) if isinstance(self.parts, tuple) else self.parts or 1

    @classmethod
    def whole(cls) -> Split:
        """The parameter is one unit, whatever the defaults say."""
        return cls()

    @classmethod
    def sizes(cls, *sizes: int, dim: int = 0, names: Sequence[str] | None = None) -> Split:
        """Parts of given extents along ``dim``: a fused qkv projection with grouped queries."""
        return cls(dim=dim, parts=sizes, names=None if names is None else tuple(names))

    @classmethod
    def equal(cls, count: int, dim: int = 0, names: Sequence[str] | None = None) -> Split:
        """``count`` equal parts along ``dim``: attention heads, a fused gate and up projection."""
        return cls(dim=dim, parts=count, names=None if names is None else tuple(names))

    @classmethod
    def experts(cls, each: Split | None = None) -> Split:
        """Every index of dim 0 apart (``[E, out, in]``), each cut again as ``each`` says."""
        inner = each or cls()
        return cls(
            per_index=True,
            dim=inner.dim,
            parts=inner.parts,
            names=inner.names,
            is_flattened=inner.is_flattened,
        )

    @classmethod
    def flattened(cls) -> Split:
        """One unit of shape ``[first dim, all other dims]``: a convolution."""
        return cls(is_flattened=True)


def optimization_units(
    name: str, shape: tuple[int, ...], split: Split
) -> tuple[OptimizationUnit, ...]:
    """Cut a parameter.

    Args:
        name: Its FQN.
        shape: Its shape.
        split: How to cut it.

    Returns:
        Disjoint units that cover the parameter, in index order.

    Raises:
        ValueError: The parameter does not have the dims that the split names, or its extent is not
            the sum of the parts.
    """
    inner = shape[1:] if split.per_index else shape
    if (split.per_index and not shape) or (split.parts is not None and split.dim >= len(inner)):
        raise ValueError(f"parameter {name!r} of shape {shape} has too few dims for {split}")
    found = []
    for index in range(shape[0]) if split.per_index else (None,):
        for label, offset, size in _parts(name, shape, inner, split):
            offsets = [0] * len(inner)
            sizes = list(inner)
            if split.parts is not None:
                offsets[split.dim], sizes[split.dim] = offset, size
            seen = tuple(sizes)
            if split.is_flattened and len(seen) > 1:
                seen = (seen[0], math.prod(seen[1:]))
            found.append(
                OptimizationUnit(
                    name=name + ("" if index is None else f"[{index}]") + label,
                    parameter=name,
                    offsets=tuple(offsets) if index is None else (index, *offsets),
                    sizes=tuple(sizes) if index is None else (1, *sizes),
                    shape=seen,
                )
            )
    return tuple(found)


def _parts(
    name: str, shape: tuple[int, ...], inner: tuple[int, ...], split: Split
) -> Iterator[tuple[str, int, int]]:
    """``(label, first index, extent)`` of every part along the split's dim."""
    if split.parts is None:
        yield "", 0, 0
        return
    extent = inner[split.dim]
    if isinstance(split.parts, int):
        if extent % split.parts:
            raise ValueError(
                f"parameter {name!r} of shape {shape}: dim {split.dim} of {extent} does not divide "
                f"into {split.parts} equal parts"
            )
        sizes: tuple[int, ...] = (extent // split.parts,) * split.parts
    else:
        sizes = split.parts
    if sum(sizes) != extent:
        raise ValueError(
            f"parameter {name!r} of shape {shape}: the parts {sizes} add up to {sum(sizes)}, but "
            f"dim {split.dim} has {extent}"
        )
    names = split.names or [str(index) for index in range(len(sizes))]
    offsets = itertools.accumulate(sizes[:-1], initial=0)
    for label, offset, size in zip(names, offsets, sizes, strict=True):
        yield f"[{label}]", offset, size
