"""What a plan costs, and why it cannot cost less: for `sshsdp plan` and for messages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sshsdp.layout.placement import binding_units
from sshsdp.layout.planner import items_of, lower_bound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sshsdp.layout.address_space import AddressSpace
    from sshsdp.layout.planner import RegionRequest

__all__ = ["WORTH_A_WORD", "PlanReport", "report_plan"]

# Padding from which on the report gives the reason.
WORTH_A_WORD = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """The padding of an address space and the demand that causes it.

    Attributes:
        numel: Elements, padding included.
        padding: Elements of padding.
        num_spans: Between so many cuts (shards, or update shards where those are cut again).
        unit: Every span must hold a multiple of this many elements, because some parameters are cut
            more than once.
        is_minimal: Proved: no legal plan has less padding.
    """

    numel: int
    padding: int
    num_spans: int
    unit: int
    is_minimal: bool

    @property
    def padding_share(self) -> float:
        """Padding over the parameters' own elements."""
        return self.padding / max(self.numel - self.padding, 1)

    @property
    def units_per_span(self) -> float:
        """How many units each span would hold without padding."""
        return (self.numel - self.padding) / self.unit / self.num_spans

    def __str__(self) -> str:
        """One line: the padding, and the reason for it where it is 1% or more."""
        line = f"padding {self.padding_share:.2%}"
        if self.padding_share < WORTH_A_WORD:
            return line
        if self.unit > 1:
            line += (
                f": {self.num_spans} shards of {self.units_per_span:.2f} pieces each, which cannot "
                f"be cut finer ({self.unit:,} elements), must all take "
                f"{self.numel // self.num_spans // self.unit}"
            )
        return f"{line}; no legal plan has less" if self.is_minimal else line


def report_plan(
    requests: Sequence[RegionRequest],
    space: AddressSpace,
    *,
    alignment: int,
    num_update_slices: int = 1,
) -> PlanReport:
    """Describe a plan of `plan_address_space`, given the same arguments."""
    num_spans = space.num_shards * num_update_slices
    span = space.numel // num_spans
    items = items_of(requests, space, alignment)
    return PlanReport(
        numel=space.numel,
        padding=space.padding,
        num_spans=num_spans,
        unit=math.lcm(*binding_units(items, span)),
        is_minimal=span == lower_bound(requests, num_spans=num_spans, alignment=alignment),
    )
