"""Placing regions between equal, fixed cuts: the arithmetic under the planner.

A *span* is what lies between two cuts: a shard, or an update shard where those are cut again.

Note: legal places. With cuts every ``span`` elements, what decides whether an item may start at
    some
place is only the distance ``room`` from there to the next cut. An item is legal if each of its
members sees its inner cuts at multiples of its unit. Two inner cuts are ``span`` apart, so a
member that is longer than two spans needs ``span`` to be a multiple of its unit, wherever it lies:
that is what limits how small padding can be, and what `next_admissible` computes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "Item",
    "Member",
    "binding_units",
    "least_span",
    "next_admissible",
    "place",
    "round_up",
]


@dataclass(frozen=True, slots=True)
class Member:
    """One region of an item.

    Attributes:
        offset: Elements from the start of the item.
        numel: Its elements.
        unit: A cut inside it must be a multiple of this many elements from its start.
    """

    offset: int
    numel: int
    unit: int

    @property
    def is_whole(self) -> bool:
        """Whether no cut may fall inside."""
        return self.unit >= self.numel


@dataclass(frozen=True, slots=True)
class Item:
    """What is placed as one: a region, or the members of a pack one after another.

    Attributes:
        members: In ascending order, without gaps.
        order: Items of one order stay together where that costs no padding.
    """

    members: tuple[Member, ...]
    order: int

    @property
    def numel(self) -> int:
        """Elements of all members."""
        last = self.members[-1]
        return last.offset + last.numel

    @property
    def unit(self) -> int:
        """The largest unit of a member, a measure of how hard the item is to place."""
        return max(member.unit for member in self.members)

    def gap(self, room: int, span: int, alignment: int) -> int | None:
        """Least padding in front of the item.

        Args:
            room: Elements from here to the next cut, ``1..span``; a multiple of ``alignment``.
            span: Elements between cuts; a multiple of ``alignment``.
            alignment: The gap is a multiple of it.

        Returns:
            The gap, smaller than ``span``; None if no place is legal.
        """
        if self.numel <= room:
            return 0
        gap = 0
        while gap < span:
            shift = max(_least_shift(member, room - gap, span) for member in self.members)
            if shift == 0:
                return gap
            gap += round_up(shift, alignment)
        return None

    def is_legal_at(self, start: int, span: int) -> bool:
        """Whether all cuts inside the item are legal if it starts there."""
        if self.numel == 0:
            return True
        room = span - start % span
        return all(_least_shift(member, room, span) == 0 for member in self.members)


def _least_shift(member: Member, distance: int, span: int) -> int:
    """How far a member must move on, at least, so that its inner cuts may become legal.

    Args:
        member: The member.
        distance: From the item's start to some cut (cuts repeat every ``span``).
        span: Elements between cuts.
    """
    if member.unit == 1:
        return 0
    # Position of the first inner cut, counted from the member's start: in (0, span].
    first = (distance - member.offset - 1) % span + 1
    if first >= member.numel:
        return 0
    if first + span < member.numel and span % member.unit:
        # No place suits both cuts: the first one must leave through the member's start.
        return first
    return first % member.unit


def least_span(items: Iterable[Item], num_spans: int, alignment: int) -> int:
    """The size of a span at which ``num_spans`` of them hold all items, were every cut legal."""
    total = sum(round_up(item.numel, alignment) for item in items)
    return round_up(-(-total // num_spans), alignment)


def binding_units(items: Iterable[Item], span: int) -> list[int]:
    """What ``span`` must be a multiple of: the units of members that always hold two cuts."""
    units = [m.unit for item in items for m in item.members if m.numel > 2 * span]
    return list(dict.fromkeys(units))


def next_admissible(items: Iterable[Item], span: int, alignment: int) -> int:
    """The smallest size of a span, from ``span`` on, that does not rule out every placement."""
    members = [member for item in items for member in item.members if member.unit > 1]
    # Equal members ask for the same; whole ones must fit into a span.
    kinds = list(dict.fromkeys((m.numel, m.unit) for m in members))
    span = max([span, *(m.numel for m in members if m.is_whole)])
    while True:
        binding = [(numel, unit) for numel, unit in kinds if numel > 2 * span]
        candidate = round_up(span, math.lcm(alignment, *(unit for _, unit in binding)))
        if not binding:
            return candidate
        # From here on the shortest of them no longer holds two cuts everywhere.
        freed = round_up(-(-min(numel for numel, _ in binding) // 2), alignment)
        if candidate <= freed:
            return candidate
        span = freed


def place(items: Sequence[Item], *, span: int, num_spans: int, alignment: int) -> list[int] | None:
    """Find legal places for all items in ``num_spans`` spans.

    Tried in turn: the given order; within each order label, the least flexible ones first; the same
    over all items; a greedy choice of what fits best at each place.

    Args:
        items: What to place.
        span: Elements between cuts.
        num_spans: Number of spans.
        alignment: Every item starts at a multiple of it.

    Returns:
        The start of each item, or None if no try succeeded.
    """
    limit = span * num_spans
    indices = range(len(items))
    given = sorted(indices, key=lambda i: items[i].order)
    by_label = sorted(indices, key=lambda i: (items[i].order, *_rigidity(items[i])))
    by_unit = sorted(indices, key=lambda i: _rigidity(items[i]))
    tried: list[list[int]] = []
    for sequence in (given, by_label, by_unit):
        if sequence in tried:
            continue
        tried.append(sequence)
        starts = _in_sequence(items, sequence, span, alignment, limit)
        if starts is not None:
            return starts
    return _best_fit(items, by_unit, span, alignment, limit)


def _rigidity(item: Item) -> tuple[int, int]:
    return -item.unit, -item.numel


def _in_sequence(
    items: Sequence[Item], sequence: list[int], span: int, alignment: int, limit: int
) -> list[int] | None:
    starts = [0] * len(items)
    cursor = 0
    for index in sequence:
        item = items[index]
        gap = item.gap(span - cursor % span, span, alignment) if item.numel else 0
        if gap is None or cursor + gap + item.numel > limit:
            return None
        starts[index] = cursor + gap
        cursor = round_up(cursor + gap + item.numel, alignment)
    return starts


def _best_fit(
    items: Sequence[Item], sequence: list[int], span: int, alignment: int, limit: int
) -> list[int] | None:
    """Place the least flexible item that fits without a gap; fill gaps with the largest that do."""
    classes: dict[Item, list[int]] = {}
    for index in reversed(sequence):
        classes.setdefault(items[index], []).append(index)
    rigid = [item for item in reversed(classes) if item.unit > alignment]
    flexible = [item for item in reversed(classes) if item.unit <= alignment]
    starts = [0] * len(items)
    cursor = 0
    while rigid or flexible:
        room = span - cursor % span
        gaps = [(item.gap(room, span, alignment), item) for item in rigid or flexible]
        gap, chosen = min(
            ((gap, item) for gap, item in gaps if gap is not None),
            key=lambda candidate: candidate[0],
            default=(0, None),
        )
        if chosen is None:
            return None
        if gap:
            for filler in rigid + flexible:
                if filler.numel <= min(gap, room):
                    gap, chosen = 0, filler
                    break
        if cursor + gap + chosen.numel > limit:
            return None
        starts[classes[chosen].pop()] = cursor + gap
        cursor = round_up(cursor + gap + chosen.numel, alignment)
        if not classes[chosen]:
            (rigid if chosen in rigid else flexible).remove(chosen)
    return starts


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple
