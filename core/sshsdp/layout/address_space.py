"""The flat address space of a communication unit, cut into equal contiguous shards.

::

    address space   |  q_proj  |  k_proj |v_proj|    o_proj    | norm |pad|
    shards (S = 4)  |    rank 0    |    rank 1    |    rank 2    |    rank 3   |

A gather output *is* the concatenation of the shards, so a parameter is a view of it at its region,
and the piece of a parameter that a rank owns is an intersection of two index ranges.

Example:
    >>> weight = Region(name="w", start=0, shape=(2, 3))
    >>> bias = Region(name="b", start=6, shape=(1,))
    >>> space = AddressSpace(regions=(weight, bias), numel=8, num_shards=2)
    >>> [(p.name, p.start, p.stop, p.offset) for p in space.pieces(*space.shard_range(1))]
    [('w', 4, 6, 0), ('b', 0, 1, 2)]
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

from sshsdp.layout.pieces import Piece

__all__ = ["AddressSpace", "Region"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """The element range of an address space in which one parameter lives.

    Attributes:
        name: Fully qualified name of the parameter.
        start: First element of the region.
        shape: Logical shape of the parameter.
        transposed: A matrix (or a batch of them) stored with its last two dims swapped: the runtime
            parameter is then an ``.mT`` view of the region.
    """

    name: str
    start: int
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def numel(self) -> int:
        """Number of elements (1 for a 0-d parameter)."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """One past the last element of the region."""
        return self.start + self.numel

    @property
    def stride(self) -> tuple[int, ...]:
        """Strides, in elements, of the logical parameter over the address space."""
        strides = [1] * len(self.shape)
        for dim in range(len(self.shape) - 2, -1, -1):
            strides[dim] = strides[dim + 1] * max(self.shape[dim + 1], 1)
        if self.transposed:
            strides[-2:] = [1, self.shape[-2]]
        return tuple(strides)


@dataclass(frozen=True, kw_only=True)
class AddressSpace:
    """Regions in one flat range ``[0, numel)`` that ``num_shards`` equal shards divide.

    Attributes:
        regions: Disjoint, in ascending order.
        numel: Size of the range in elements, padding included; a multiple of ``num_shards``.
        num_shards: Size S of the ``shard`` mesh dimension.
    """

    regions: tuple[Region, ...]
    numel: int
    num_shards: int

    def __post_init__(self) -> None:
        end = 0
        for region in self.regions:
            if region.transposed and len(region.shape) < 2:
                raise ValueError(
                    f"region {region.name!r} of shape {region.shape} cannot be transposed"
                )
            if region.start < end:
                raise ValueError(
                    f"region {region.name!r} starts at {region.start}, before {end}, "
                    "the end of the region in front of it"
                )
            end = region.stop
        if end > self.numel:
            raise ValueError(f"regions end at {end}, past the address space of {self.numel}")
        if self.num_shards < 1 or self.numel % self.num_shards:
            raise ValueError(f"{self.numel} elements do not divide into {self.num_shards} shards")

    @property
    def shard_numel(self) -> int:
        """Elements in each shard."""
        return self.numel // self.num_shards

    @cached_property
    def num_parameter_elements(self) -> int:
        """Elements that belong to parameters, that is, all but padding."""
        return sum(region.numel for region in self.regions)

    @property
    def padding(self) -> int:
        """Elements that belong to no parameter."""
        return self.numel - self.num_parameter_elements

    @cached_property
    def _starts(self) -> list[int]:
        return [region.start for region in self.regions]

    @cached_property
    def by_name(self) -> dict[str, Region]:
        """The regions by parameter name."""
        return {region.name: region for region in self.regions}

    def shard_range(self, shard: int) -> tuple[int, int]:
        """Element range ``[start, stop)`` of one shard."""
        return shard * self.shard_numel, (shard + 1) * self.shard_numel

    def pieces(self, start: int, stop: int) -> tuple[Piece, ...]:
        """The non-empty parts of parameters inside ``[start, stop)``, in ascending order."""
        found = []
        for region in self.regions[max(bisect_right(self._starts, start) - 1, 0) :]:
            if region.start >= stop:
                break
            low, high = max(region.start, start), min(region.stop, stop)
            if low < high:
                found.append(
                    Piece(
                        name=region.name,
                        shape=region.shape,
                        start=low - region.start,
                        stop=high - region.start,
                        offset=low - start,
                        transposed=region.transposed,
                    )
                )
        return tuple(found)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The padding, as non-empty element ranges."""
        found = []
        end = 0
        for region in self.regions:
            if region.start > end:
                found.append((end, region.start))
            end = region.stop
        if self.numel > end:
            found.append((end, self.numel))
        return tuple(found)
