"""Which parameters share a space: those with flat update shards, or those with whole matrices.

`sshsdp.shard` makes flat spaces, because the optimizers are not known yet. `engine.attach` then
moves the parameters of matrix optimizers to `OwnedSpace`s, unit by unit, before training.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from sshsdp.layout.owners import assign_owners_on_mesh
from sshsdp.ownership.owned_space import OwnedMatrix, OwnedSpace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sshsdp.comm.topology import Topology
    from sshsdp.layout.optimization_units import OptimizationUnit
    from sshsdp.ownership.exchange import MatrixExchange
    from sshsdp.parameters.slots import PackSlot, ParameterSlot
    from sshsdp.spaces.space import ShardedSpace
    from sshsdp.spaces.unit import Unit

    Matrices = tuple[OptimizationUnit, ...]
    # None: the parameter has a flat update shard.
    Wishes = Mapping[ParameterSlot, Matrices | None]

__all__ = ["Arrangement", "plan_arrangement"]


@dataclass(frozen=True)
class _Pool:
    """Spaces of one unit and one format, whose parameters are to be divided anew.

    Attributes:
        unit: The unit.
        spaces: Its spaces now.
        wishes: What is to become of each parameter.
    """

    unit: Unit
    spaces: list[ShardedSpace]
    wishes: dict[ParameterSlot, Matrices | None]

    @property
    def packs(self) -> list[PackSlot]:
        """The packs of all spaces."""
        return [pack for space in self.spaces for pack in space.packs]


@dataclass(frozen=True)
class Arrangement:
    """What has to be moved; the same on every rank.

    Attributes:
        kept: Spaces that stay as they are.
        pools: The others.
    """

    kept: list[ShardedSpace] = field(default_factory=list)
    pools: list[_Pool] = field(default_factory=list)

    @property
    def moved_spaces(self) -> list[ShardedSpace]:
        """The spaces that will be no more."""
        return [space for pool in self.pools for space in pool.spaces]

    @property
    def needs_owners(self) -> bool:
        """Whether there will be owned matrices."""
        wishes = [wish for pool in self.pools for wish in pool.wishes.values()]
        return any(wish is not None for wish in wishes)

    def carry_out(self, topology: Topology, exchange: MatrixExchange | None) -> None:
        """Make the new spaces and move the values there. Collective; one unit at a time is whole.

        Args:
            topology: The mesh.
            exchange: Needed if `needs_owners`.
        """
        owners = self._assign(topology)
        for pool in self.pools:
            _rebuild(pool, topology, owners, exchange)

    def _assign(self, topology: Topology) -> dict[ParameterSlot, list[OwnedMatrix]]:
        loads = [[0] * topology.num_shards for _ in range(topology.num_update_slices)]
        for space in self.kept:
            for matrix in space.matrices if isinstance(space, OwnedSpace) else ():
                row, column = matrix.owner
                loads[row][column] += matrix.unit.numel
        items = [
            (slot, unit)
            for pool in self.pools
            for slot, wish in pool.wishes.items()
            for unit in wish or ()
        ]
        # Elements stand for both the optimizer's memory and, for matrices of one model, its time.
        places = assign_owners_on_mesh([unit.numel for _, unit in items], loads)
        found: dict[ParameterSlot, list[OwnedMatrix]] = {}
        for (slot, unit), owner in zip(items, places, strict=True):
            found.setdefault(slot, []).append(OwnedMatrix(unit, slot, owner))
        return found


def plan_arrangement(
    units: Sequence[Unit],
    wishes: Wishes,
    whole: Callable[[ParameterSlot], Matrices],
) -> Arrangement:
    """Compare what is with what is wished for.

    Args:
        units: All units.
        wishes: Matrices (or None: flat) of parameters that are attached now; others stay.
        whole: A parameter as one matrix.
    """
    arrangement = Arrangement()
    for unit in units:
        pools: dict[tuple[object, ...], list[ShardedSpace]] = {}
        for space in unit.trainable_spaces:
            pools.setdefault(space.format_key, []).append(space)
        for spaces in pools.values():
            now = {slot: found for space in spaces for slot, found in _as_it_is(space).items()}
            pool = _Pool(unit, spaces, {slot: wishes.get(slot, now[slot]) for slot in now})
            # A pack is one runtime tensor and cannot be torn apart.
            for pack in pool.packs:
                if any(pool.wishes[member] is not None for member in pack.members):
                    for member in pack.members:
                        pool.wishes[member] = pool.wishes[member] or whole(member)
            if pool.wishes == now:
                arrangement.kept.extend(spaces)
            else:
                arrangement.pools.append(pool)
    return arrangement


def _as_it_is(space: ShardedSpace) -> dict[ParameterSlot, Matrices | None]:
    if not isinstance(space, OwnedSpace):
        return dict.fromkeys(space.slots)
    found: dict[ParameterSlot, Matrices | None] = {}
    for matrix in space.matrices:
        found[matrix.slot] = (*(found.get(matrix.slot) or ()), matrix.unit)
    return found


def _rebuild(
    pool: _Pool,
    topology: Topology,
    owners: Mapping[ParameterSlot, Sequence[OwnedMatrix]],
    exchange: MatrixExchange | None,
) -> None:
    values: dict[ParameterSlot, torch.Tensor] = {}
    for space in pool.spaces:
        collected = space.collect()
        values.update({slot: space.view_of(slot, collected) for slot in space.slots})
    order = {slot: index for index, slot in enumerate(values)}
    source = pool.spaces[0]
    made: list[ShardedSpace] = []
    flat = [slot for slot in values if slot not in owners]
    owned = [slot for slot in values if slot in owners]
    if flat:
        made.append(source.sibling(flat, _packs_of(pool, flat), order))
    if owned:
        assert exchange is not None
        matrices = [matrix for slot in owned for matrix in owners[slot]]
        packs = _packs_of(pool, owned)
        made.append(OwnedSpace(source, owned, packs, order, matrices, exchange))
    for space in made:
        new = torch.zeros(space.layout.numel, dtype=space.update_dtype, device=topology.device)
        with torch.no_grad():
            for slot in space.slots:
                space.view_of(slot, new).copy_(values[slot])
        space.take(new)
    position = pool.unit.spaces.index(source)
    rest = [space for space in pool.unit.spaces if space not in pool.spaces]
    pool.unit.spaces[:] = [*rest[:position], *made, *rest[position:]]


def _packs_of(pool: _Pool, slots: Sequence[ParameterSlot]) -> list[PackSlot]:
    return [pack for pack in pool.packs if pack.members[0] in slots]
