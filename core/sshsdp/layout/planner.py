"""The planner: a pure function from shapes to address spaces.

Every rank computes the same plan from the same input; the engine compares digests before the first
collective.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sshsdp.layout.address_space import AddressSpace, Region

__all__ = ["RegionRequest", "plan_address_space"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionRequest:
    """What the planner must know of one parameter.

    Attributes:
        name: Fully qualified name.
        shape: Logical shape.
        order: Parameters with a lower value come first; equal ones keep the given order. Regions of
            one optimizer param group share a value, so that they form one contiguous range.
    """

    name: str
    shape: tuple[int, ...]
    order: int = 0


def plan_address_space(
    requests: Sequence[RegionRequest],
    *,
    num_shards: int,
    alignment: int,
    num_update_slices: int = 1,
) -> AddressSpace:
    """Lay parameters out one after another.

    Args:
        requests: The parameters of one address space.
        num_shards: Size of the ``shard`` mesh dimension.
        alignment: Every region and every shard starts at a multiple of this many elements, so that
            kernels read aligned addresses.
        num_update_slices: Into how many equal update shards each shard is cut again.

    Returns:
        The address space; its size is a multiple of ``num_shards * num_update_slices * alignment``.
    """
    regions = []
    cursor = 0
    for request in sorted(requests, key=lambda request: request.order):
        regions.append(Region(name=request.name, start=cursor, shape=request.shape))
        cursor = _round_up(cursor + math.prod(request.shape), alignment)
    numel = _round_up(cursor, num_shards * num_update_slices * alignment)
    return AddressSpace(regions=tuple(regions), numel=numel, num_shards=num_shards)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
