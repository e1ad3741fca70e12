"""The planner: a pure function from shapes to address spaces.

All shards, and the update shards inside of them, have one size; the planner looks for the smallest
one at which every parameter finds a place where the cuts between shards are legal for it. It
chooses the order, the padding and, where allowed, whether a matrix is stored transposed.

Every rank computes the same plan from the same input; the engine compares digests before the first
collective.

Example:
    >>> plan_address_space(
    ...     [RegionRequest(name="w", shape=(5, 3), cut_unit=3)], num_shards=3, alignment=1
    ... ).numel
    18
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from sshsdp.layout.address_space import AddressSpace, Region
from sshsdp.layout.placement import Item, Member, least_span, next_admissible, place, round_up

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["RegionRequest", "items_of", "lower_bound", "plan_address_space"]

# Storage orders are tried together for this many kinds of matrices, the largest ones.
_MAX_CHOICES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionRequest:
    """What the planner must know of one parameter.

    Attributes:
        name: Fully qualified name.
        shape: Logical shape.
        order: Parameters with a lower value come first; equal ones keep the given order. Regions
            of one optimizer param group share a value, so that they form one contiguous range.
            Given up where it would cost padding.
        cut_unit: A shard cut inside the region must be a multiple of this many elements away from
            its start, in storage order (see `sshsdp.layout.cuts`). 1: anywhere; the parameter's
            numel or more: never cut.
        transposed_cut_unit: The same if the parameter (2-D, or a batch of matrices) is stored with
            its last two dims swapped, which is done only where it helps; None: it must not be.
        pack: Parameters that share this label are neighbours, in the given order, with no gap
            between them. They are stored as they are.
    """

    name: str
    shape: tuple[int, ...]
    order: int = 0
    cut_unit: int = 1
    transposed_cut_unit: int | None = None
    pack: str | None = None

    def __post_init__(self) -> None:
        """Refuse cut units below 1."""
        for unit in (self.cut_unit, self.transposed_cut_unit):
            if unit is not None and unit < 1:
                raise ValueError(
                    f"parameter {self.name!r}: a cut unit must be 1 or more, got {unit}"
                )


def plan_address_space(
    requests: Sequence[RegionRequest],
    *,
    num_shards: int,
    alignment: int,
    num_update_slices: int = 1,
) -> AddressSpace:
    """Lay parameters out with the least padding that the search finds.

    With cut units of 1 the parameters follow one another in the given order. There always is a
    plan: if a space is too small for so many legal cuts, some shards hold nothing but padding.

    Args:
        requests: The parameters of one address space.
        num_shards: Size of the ``shard`` mesh dimension.
        alignment: Every region (of a pack: the first one) and every shard starts at a multiple of
            this many elements, so that kernels read aligned addresses.
        num_update_slices: Into how many equal update shards each shard is cut again; their cuts are
            legal too.

    Returns:
        The address space; its size is a multiple of ``num_shards * num_update_slices * alignment``.

    Raises:
        ValueError: ``num_shards``, ``alignment`` or ``num_update_slices`` below 1.
    """
    for what, value in (
        ("num_shards", num_shards),
        ("alignment", alignment),
        ("num_update_slices", num_update_slices),
    ):
        if value < 1:
            raise ValueError(f"{what} must be 1 or more, got {value}")
    groups = _group(requests)
    num_spans = num_shards * num_update_slices
    plan = _plan(tuple(_signature(group) for group in groups), num_spans, alignment)
    regions = []
    for group, start, is_transposed in zip(groups, plan.starts, plan.transposed, strict=True):
        cursor = start
        for request in group:
            region = Region(
                name=request.name, start=cursor, shape=request.shape, transposed=is_transposed
            )
            regions.append(region)
            cursor = region.stop
    regions.sort(key=lambda region: (region.start, region.stop))
    return AddressSpace(regions=tuple(regions), numel=plan.span * num_spans, num_shards=num_shards)


def _group(requests: Sequence[RegionRequest]) -> list[list[RegionRequest]]:
    """Packs and single parameters, a pack where its first member stands."""
    groups: dict[tuple[str, str], list[RegionRequest]] = {}
    for request in requests:
        key = ("pack", request.pack) if request.pack is not None else ("", request.name)
        groups.setdefault(key, []).append(request)
    return list(groups.values())


# What a plan depends on: order, and (numel, unit, transposed unit) of each member.
_Signature = tuple[int, tuple[tuple[int, int, int | None], ...]]


def _signature(group: list[RegionRequest]) -> _Signature:
    members = tuple(
        (
            math.prod(request.shape),
            request.cut_unit,
            request.transposed_cut_unit if len(group) == 1 and len(request.shape) > 1 else None,
        )
        for request in group
    )
    return group[0].order, members


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where the groups of a space start, which are transposed, and the size of a span."""

    starts: tuple[int, ...]
    transposed: tuple[bool, ...]
    span: int


@lru_cache(maxsize=256)
def _plan(groups: tuple[_Signature, ...], num_spans: int, alignment: int) -> _Plan:
    """Search over storage orders; cached, because the blocks of a model are alike."""
    as_given = _items(groups, (False,) * len(groups), alignment)
    smallest = least_span(as_given, num_spans, alignment)
    best: _Plan | None = None
    for bound, transposed in _storage_orders(groups, smallest, alignment):
        if best is not None and bound >= best.span:
            break
        items = _items(groups, transposed, alignment)
        limit = None if best is None else best.span
        found = _smallest_span(items, bound, num_spans, alignment, limit)
        if found is not None:
            span, starts = found
            needed = tuple(
                is_transposed and not item.is_legal_at(start, span)
                for is_transposed, item, start in zip(transposed, as_given, starts, strict=True)
            )
            best = _Plan(tuple(starts), needed, span)
    assert best is not None
    return best


def lower_bound(requests: Sequence[RegionRequest], *, num_spans: int, alignment: int) -> int:
    """A size of a span that no legal plan goes below, whatever the order and the storage orders."""
    groups = tuple(_signature(group) for group in _group(requests))
    as_given = _items(groups, (False,) * len(groups), alignment)
    smallest = least_span(as_given, num_spans, alignment)
    if len(_open_kinds(groups, smallest)) > _MAX_CHOICES:
        return smallest
    return _storage_orders(groups, smallest, alignment)[0][0]


def items_of(requests: Sequence[RegionRequest], space: AddressSpace, alignment: int) -> list[Item]:
    """What was placed, for a report about a plan."""
    groups = _group(requests)
    transposed = tuple(space.by_name[group[0].name].transposed for group in groups)
    return _items(tuple(_signature(group) for group in groups), transposed, alignment)


def _items(
    groups: tuple[_Signature, ...], transposed: tuple[bool, ...], alignment: int
) -> list[Item]:
    items = []
    for (order, members), is_transposed in zip(groups, transposed, strict=True):
        offset = 0
        placed = []
        for numel, unit, transposed_unit in members:
            chosen = transposed_unit if is_transposed else unit
            assert chosen is not None
            # Starts and cuts are aligned, so the distance between them is.
            aligned = chosen if chosen == 1 else math.lcm(chosen, alignment)
            placed.append(Member(offset, numel, aligned if len(members) == 1 else chosen))
            offset += numel
        items.append(Item(tuple(placed), order))
    return items


def _storage_orders(
    groups: tuple[_Signature, ...], smallest: int, alignment: int
) -> list[tuple[int, tuple[bool, ...]]]:
    """Which groups to store transposed, with the least size of a span that this allows.

    A matrix that few cuts can reach takes the order with the smaller cut unit. For those that are
    cut many times, all combinations are listed, the most promising first: units that divide each
    other can beat smaller ones.
    """
    open_kinds = _open_kinds(groups, smallest)[:_MAX_CHOICES]
    combinations = []
    for choice in itertools.product((False, True), repeat=len(open_kinds)):
        chosen = dict(zip(open_kinds, choice, strict=True))
        transposed = tuple(
            chosen.get(members[0], members[0][2] is not None and members[0][2] < members[0][1])
            for _, members in groups
        )
        bound = next_admissible(_items(groups, transposed, alignment), smallest, alignment)
        combinations.append((bound, sum(transposed), transposed))
    combinations.sort()
    return [(bound, transposed) for bound, _, transposed in combinations]


def _open_kinds(groups: tuple[_Signature, ...], smallest: int) -> list[tuple[int, int, int | None]]:
    """The kinds of matrices whose storage order decides what a span must be a multiple of."""
    kinds: dict[tuple[int, int, int | None], int] = {}
    for _, members in groups:
        for kind in members:
            numel, unit, transposed_unit = kind
            if transposed_unit not in (None, unit) and numel > 2 * smallest:
                kinds[kind] = kinds.get(kind, 0) + numel
    return sorted(kinds, key=lambda kind: -kinds[kind])


def _smallest_span(
    items: list[Item], bound: int, num_spans: int, alignment: int, limit: int | None
) -> tuple[int, list[int]] | None:
    """A size of a span, from ``bound`` on and below ``limit``, at which all items fit.

    The first one in steps of 0.4%, then the first one in steps of 0.02% between it and the last
    that failed.
    """
    best = None
    for resolution in (8, 12):
        for span in _candidates(items, bound, alignment, resolution):
            if limit is not None and span >= limit:
                break
            starts = place(items, span=span, num_spans=num_spans, alignment=alignment)
            if starts is not None:
                best, limit = (span, starts), span
                break
            bound = span
    return best


def _candidates(items: list[Item], bound: int, alignment: int, resolution: int) -> Iterator[int]:
    """Admissible sizes in ascending order, in relative steps of ``2 ** -resolution``.

    Multiples of the members' units are preferred: at those nothing needs padding in front.
    """
    units = sorted(
        {member.unit for item in items for member in item.members if not member.is_whole}
    )
    commons = [*itertools.accumulate(units, math.lcm, initial=alignment)]
    span = bound
    while True:
        yield span
        step = max(span >> resolution, 1)
        fine = max(common for common in commons if common <= step or common == alignment)
        following = [round_up(span + step, fine)]
        following += [round_up(span + 1, common) for common in commons if common > step]
        span = next_admissible(items, min(following), alignment)
