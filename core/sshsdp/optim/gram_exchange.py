"""Gram matrices of matrices whose rows are spread over ranks: summed, worked on, given back.

Every Gram matrix has one rank that gets the sum and computes a factor from it, so that neither the
sums nor the work are there twice. Over the axes ``(shard, replicate)``::

    terms --reduce-scatter, axis by axis--> sums --compute--> factors
    factors --all-gather, axis by axis in reverse--> factors on every rank
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, TypeVar

import torch

from sshsdp.layout.owners import assign_owners

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sshsdp.comm.collectives import Collectives, Pending

__all__ = ["GramExchange", "split_by_size"]

_Item = TypeVar("_Item")


def split_by_size(
    items: Sequence[_Item], sizes: Sequence[int], limit: int
) -> Iterator[Sequence[_Item]]:
    """Runs of items whose sizes add up to ``limit`` at most, or of one larger item."""
    first = total = 0
    for index, size in enumerate(sizes):
        if index > first and total + size > limit:
            yield items[first:index]
            first, total = index, 0
        total += size
    yield items[first:]


class GramExchange:
    """The sums of some Gram matrices, on their way.

    Args:
        grams: This rank's terms: ``[n, n]`` each, of one dtype, the same shapes on every rank.
        axes: Over which the terms are spread.
    """

    def __init__(self, grams: Sequence[torch.Tensor], axes: Sequence[Collectives]) -> None:
        self._axes = axes
        self._shapes = [gram.shape for gram in grams]
        num_ranks = math.prod(axis.size for axis in axes)
        self._owners = assign_owners([len(gram) ** 3 for gram in grams], [0] * num_ranks)
        parts: list[list[torch.Tensor]] = [[] for _ in range(num_ranks)]
        for gram, owner in zip(grams, self._owners, strict=True):
            parts[owner].append(gram.reshape(-1))
        numel = max(sum(part.numel() for part in its_parts) for its_parts in parts)
        self._terms = grams[0].new_zeros(num_ranks, numel)
        for row, its_parts in zip(self._terms, parts, strict=True):
            if its_parts:
                torch.cat(its_parts, out=row[: sum(part.numel() for part in its_parts)])
        self._sums = self._terms.view(-1)
        # Over the first axis, most is moved: in the background. What follows is small.
        self._pending = self._reduce(axes[0])

    def _reduce(self, axis: Collectives) -> Pending:
        def keep(sums: torch.Tensor) -> None:
            self._sums = sums

        return axis.reduce_scatter(self._sums, "Gram matrices", keep)

    def factors(self, compute: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        """What ``compute`` makes of every sum, on every rank.

        Args:
            compute: From sums ``[batch, n, n]`` to factors of the same shape.
        """
        self._pending.wait()
        for axis in self._axes[1:]:
            self._reduce(axis).wait()
        mine = 0
        for axis in self._axes:
            mine = mine * axis.size + axis.rank
        alike: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
        for place in self._places(self._sums[None], mine):
            alike[place.shape].append(place)
        for places in alike.values():
            for place, factor in zip(places, compute(torch.stack(places)), strict=True):
                place.copy_(factor)
        whole = self._sums
        for axis in reversed(self._axes):
            gathered = whole.new_empty(axis.size * whole.numel())
            axis.all_gather(gathered, whole, "Newton-Schulz factors").wait()
            whole = gathered
        return self._places(whole.view(self._terms.shape), None)

    def _places(self, rows: torch.Tensor, owner: int | None) -> list[torch.Tensor]:
        """Views of the matrices inside of a row for each owner, or of the one row of one owner."""
        cursors: dict[int, int] = defaultdict(int)
        places = []
        for shape, its_owner in zip(self._shapes, self._owners, strict=True):
            if owner in (None, its_owner):
                row = rows[its_owner if owner is None else 0]
                start = cursors[its_owner]
                cursors[its_owner] += shape.numel()
                places.append(row[start : cursors[its_owner]].view(shape))
        return places
