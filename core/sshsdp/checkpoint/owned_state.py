"""Whole optimizer states of owned matrices, gathered on rank 0 and given out again."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from sshsdp.checkpoint.optimizer_state import place_scalar
from sshsdp.ownership.owned_space import OwnedTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sshsdp.comm.topology import Topology
    from sshsdp.optim.binding import OptimizerBinding
    from sshsdp.ownership.owned_space import OwnedSpace

__all__ = ["gather_states", "scatter_states"]


def gather_states(
    binding: OptimizerBinding, space: OwnedSpace, topology: Topology
) -> dict[str, dict[str, Any]]:
    """State by parameter name on rank 0, on the CPU; elsewhere nothing. Collective.

    What several matrices of one parameter keep for each element is put together; of the rest, the
    first matrix speaks for all.
    """
    mine = []
    for update in binding.updates_of(space):
        assert isinstance(update, OwnedTensor)
        state = binding.optimizer.state.get(update.tensor, {})
        copied = tree_map_only(torch.Tensor, lambda t: t.detach().cpu().clone(), dict(state))
        mine.append((space.matrices.index(update.matrix), copied))
    world = topology.world
    # With replicated updates, every row has the same.
    gathered: list[Any] | None = [None] * world.size if world.rank == 0 else None
    dist.gather_object(mine, gathered, dst=0, group=world.group)
    found: dict[str, dict[str, Any]] = {}
    for index, state in sorted(
        (entry for entries in gathered or () for entry in entries), key=lambda entry: entry[0]
    ):
        matrix = space.matrices[index]
        whole = found.setdefault(matrix.slot.name, {})
        for key, value in state.items():
            is_cut = isinstance(value, torch.Tensor) and value.shape == matrix.unit.shape
            if is_cut and matrix.unit.sizes != matrix.slot.shape:
                target = whole.setdefault(key, torch.zeros(matrix.slot.shape, dtype=value.dtype))
                matrix.of(target).copy_(value.view(matrix.unit.sizes))
            elif is_cut:
                whole[key] = value.reshape(matrix.slot.shape)
            else:
                whole.setdefault(key, value)
    return found


def scatter_states(
    binding: OptimizerBinding,
    space: OwnedSpace,
    topology: Topology,
    whole: Mapping[str, Mapping[str, Any]],
) -> None:
    """Give every matrix its part of rank 0's ``whole`` (by parameter name). Collective."""
    world = topology.world
    parts: list[Any] | None = None
    if world.rank == 0:
        names = [matrix.slot.name for matrix in space.matrices]
        by_matrix = [
            _part(space, index, whole[name]) if name in whole else None
            for index, name in enumerate(names)
        ]
        owners = [matrix.owner for matrix in space.matrices]
        parts = [
            {i: by_matrix[i] for i, owner in enumerate(owners) if owner == place}
            for place in _places_by_rank(topology)
        ]
    groups = {update: binding.optimizer.param_groups[index] for index, update in binding.updates()}
    received: list[Any] = [None]
    dist.scatter_object_list(received, parts, src=0, group=world.group)
    for update in binding.updates_of(space):
        assert isinstance(update, OwnedTensor)
        state = received[0][space.matrices.index(update.matrix)]
        for key, value in (state or {}).items():
            place = partial(place_scalar, key=key, update=update.tensor, group=groups[update])
            placed = tree_map_only(torch.Tensor, place, value)
            binding.optimizer.state[update.tensor][key] = placed


def _places_by_rank(topology: Topology) -> list[tuple[int, int]]:
    rows = range(topology.num_replicas)
    is_divided = topology.num_update_slices > 1
    return [(row if is_divided else 0, c) for row in rows for c in range(topology.num_shards)]


def _part(space: OwnedSpace, index: int, state: Mapping[str, Any]) -> dict[str, Any]:
    matrix = space.matrices[index]
    return {
        key: matrix.of(value).reshape(matrix.unit.shape).clone()
        if isinstance(value, torch.Tensor) and value.shape == matrix.slot.shape
        else value
        for key, value in state.items()
    }
