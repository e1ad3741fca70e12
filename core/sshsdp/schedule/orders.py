"""The orders in which units are gathered and reduced, the same on every rank."""

from __future__ import annotations

import itertools
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sshsdp.spaces.unit import Unit

__all__ = ["Orders", "merge_sequences"]


class Orders:
    """The orders in which units are gathered in forward and backward, and reduced.

    Attributes:
        forward: Gathers in forward.
        backward: Gathers in backward.
        reduction: Reductions.
        recomputed: The units whose forward backward runs again.
        detached: Units that ran outside of any graph, as frozen ones do in front of the first
            trainable one.
    """

    def __init__(
        self,
        forward: list[Unit],
        backward: list[Unit],
        reduction: list[Unit],
        recomputed: list[Unit],
        detached: list[Unit],
    ) -> None:
        """Take three orders of the same units, and those that are recomputed or detached."""
        self.forward = forward
        self.backward = backward
        self.reduction = reduction
        self.recomputed = recomputed
        self.detached = detached

    def __iter__(self) -> Iterator[list[Unit]]:
        """Forward, backward, reduction, recomputed, detached."""
        return iter((self.forward, self.backward, self.reduction, self.recomputed, self.detached))

    @classmethod
    def of_registration(cls, units: Sequence[Unit]) -> Orders:
        """Units as the model registers them, root first; backwards in backward.

        All pass for recomputed.
        """
        return cls(list(units), list(reversed(units)), list(reversed(units)), list(units), [])

    @classmethod
    def merged(cls, units: Sequence[Unit], seen: Sequence[Sequence[Sequence[int]]]) -> Orders:
        """One order that agrees with what every rank did.

        Args:
            units: All units.
            seen: For every rank, the indices of the units seen in forward, backward, reduction and
                recomputation, and outside of any graph.
        """
        default = list(range(len(units)))
        forward = merge_sequences(default, [by_rank[0] for by_rank in seen])
        # The root's backward begins before all others; behind them, it would let units that no rank
        # has used yet pass in front of it.
        backward = merge_sequences([0, *default[:0:-1]], [by_rank[1] for by_rank in seen])
        reduction = merge_sequences(default[::-1], [by_rank[2] for by_rank in seen])
        reached = {index for by_rank in seen for index in by_rank[1]}
        recomputed = {index for by_rank in seen for index in by_rank[3]}
        detached = {index for by_rank in seen for index in by_rank[4]} - reached
        # Frozen units in front of the first trainable one never have a backward. Others may have,
        # in a step in which ranks take other ways.
        blocks = [index for index in forward if not units[index].is_root]
        leading = itertools.takewhile(lambda index: not units[index].trainable_spaces, blocks)
        dispensable = detached.intersection(leading)
        return cls(
            [units[index] for index in forward],
            [units[index] for index in backward if index not in dispensable],
            [units[index] for index in reduction],
            [units[i] for i in default if i in recomputed or i not in reached],
            [units[i] for i in default if i in detached],
        )


def merge_sequences(default: Sequence[int], sequences: Sequence[Sequence[int]]) -> list[int]:
    """An order of ``default``'s items in which every sequence is in order.

    Items that no sequence binds stay as near to their default place as possible. A sequence that
    contradicts earlier ones is left out.

    Example:
        >>> merge_sequences([3, 2, 1, 0], [[2, 0], [3, 2, 1, 0]])
        [3, 2, 1, 0]
        >>> merge_sequences([0, 1, 2], [[2, 0]])
        [1, 2, 0]
    """
    accepted: list[Sequence[int]] = []
    order = list(default)
    for sequence in dict.fromkeys(tuple(sequence) for sequence in sequences):
        merged = _sort(default, [*accepted, sequence])
        if merged is not None:
            accepted.append(sequence)
            order = merged
    return order


def _sort(default: Sequence[int], sequences: Sequence[Sequence[int]]) -> list[int] | None:
    """Topological order by default place, None if the sequences contradict each other."""
    place = {item: index for index, item in enumerate(default)}
    followers: dict[int, list[int]] = {item: [] for item in default}
    num_before = dict.fromkeys(default, 0)
    for sequence in sequences:
        for earlier, later in itertools.pairwise(sequence):
            followers[earlier].append(later)
            num_before[later] += 1
    ready = [(place[item], item) for item in default if not num_before[item]]
    heapify(ready)
    order = []
    while ready:
        _, item = heappop(ready)
        order.append(item)
        for later in followers[item]:
            num_before[later] -= 1
            if not num_before[later]:
                heappush(ready, (place[later], later))
    return order if len(order) == len(default) else None
