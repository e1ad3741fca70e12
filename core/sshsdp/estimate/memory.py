"""Memory of one rank, by kind.

Buffers that come and go are counted at their peak. For the engine the peaks are the ones that
`engine.stats` measures:

* gathered parameters: the root, the unit that runs and those gathered ahead;
* unsharded gradients: the root's, those of the unit in backward, and those of the one before it,
  whose reduction is in flight. Under `no_sync` every unit's stay.

FSDP2 holds gradients in the compute dtype until it copies them into a reduction's input.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sshsdp.estimate.costs import ModelCost, SpaceCost, UnitCost
    from sshsdp.estimate.optimizers import OptimizerCost

__all__ = ["HOST_KINDS", "RankMemory", "rank_memory"]

# What is in the host's memory if updates are made there.
HOST_KINDS = ("masters", "optimizer_state", "sharded_gradients")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes on one rank.

    Attributes:
        is_offloaded: `HOST_KINDS` are on the host, not on the accelerator.
        runtime_shards: What gathers send.
        masters: Update parameters that are memory of their own.
        optimizer_state: State of the optimizer.
        sharded_gradients: Reduced gradients, waiting for the optimizer.
        unsharded_gradients: Peak of the reduce-scatter inputs (FSDP2: and of the gradients that are
            copied into them).
        gathered_units: Peak of the gathered parameters.
        activations: Kept from forward for backward.
    """

    is_offloaded: bool = False
    runtime_shards: int
    masters: int
    optimizer_state: int
    sharded_gradients: int
    unsharded_gradients: int
    gathered_units: int
    activations: int = 0

    @property
    def on_host(self) -> int:
        """Bytes in the host's memory."""
        return sum(getattr(self, kind) for kind in HOST_KINDS) if self.is_offloaded else 0

    @property
    def total(self) -> int:
        """Bytes in the accelerator's memory."""
        kinds = [item.name for item in fields(self) if item.name != "is_offloaded"]
        everything: int = sum(getattr(self, kind) for kind in kinds)
        return everything - self.on_host


def rank_memory(
    cost: ModelCost,
    optimizer: OptimizerCost,
    *,
    num_micro_batches: int = 1,
    activations: int = 0,
) -> RankMemory:
    """Memory of one rank under a scheme.

    Args:
        cost: The model under the scheme.
        optimizer: The optimizer.
        num_micro_batches: Passes per step; with more than one, gradients accumulate unreduced.
        activations: Bytes of activations, from `sshsdp.estimate.work`.
    """
    num_parts = cost.num_shards * cost.num_update_slices
    trained = [space for space in cost.spaces if space.trainable]
    runtime = masters = 0
    for space in cost.spaces:
        shard = space.numel // cost.num_shards
        if not space.trainable or cost.has_runtime_shards:
            runtime += space.format.stored_nbytes(shard)
        if space.trainable and not (cost.has_runtime_shards and space.is_shared):
            masters += space.numel // num_parts * space.update_itemsize
    state = sum(
        _state_nbytes(space, optimizer, is_root=unit.is_root) / num_parts
        for unit in cost.units
        for space in unit.spaces
        if space.trainable
    )
    return RankMemory(
        is_offloaded=cost.is_offloaded,
        runtime_shards=runtime,
        masters=masters,
        optimizer_state=math.ceil(state),
        sharded_gradients=sum(s.numel // num_parts * s.update_itemsize for s in trained),
        unsharded_gradients=_unsharded_gradients(cost, num_micro_batches),
        gathered_units=_gathered_units(cost),
        activations=activations,
    )


def _state_nbytes(space: SpaceCost, optimizer: OptimizerCost, *, is_root: bool) -> float:
    """State of a space over all ranks; padding is updated like everything else."""
    own = sum(
        optimizer.state_nbytes(shape, space.update_itemsize, not is_root) for shape in space.shapes
    )
    if optimizer.granularity == "matrix":
        return own
    return own * space.numel / max(space.num_parameter_elements, 1)


def _window(units: list[UnitCost], length: int, attribute: str) -> int:
    """The largest sum over ``length`` units that follow one another."""
    sizes = [getattr(unit, attribute) for unit in units]
    starts = range(max(len(sizes) - length + 1, 1))
    return max((sum(sizes[start : start + length]) for start in starts), default=0)


def _gathered_units(cost: ModelCost) -> int:
    if cost.num_shards == 1 and cost.has_runtime_shards:
        # The shard is the whole.
        return 0
    if cost.copies_in_and_out:
        # Copied out without padding; only what is on its way has it.
        root = sum(unit.parameter_nbytes for unit in cost.units if unit.is_root)
        num_units = 1 if cost.reshard_after_forward else len(cost.units)
        kept = root + _window(cost.inner_units, num_units, "parameter_nbytes")
        return kept + _window(cost.inner_units, cost.prefetch, "gathered_nbytes")
    root = sum(unit.gathered_nbytes for unit in cost.units if unit.is_root)
    num_units = 1 + cost.prefetch if cost.reshard_after_forward else len(cost.units)
    return root + _window(cost.inner_units, num_units, "gathered_nbytes")


def _unsharded_gradients(cost: ModelCost, num_micro_batches: int) -> int:
    if cost.num_shards * cost.num_update_slices == 1 and not cost.copies_in_and_out:
        # The reduced gradients are views of it.
        return 0
    if num_micro_batches > 1:
        return sum(unit.gradient_nbytes for unit in cost.units)
    root = [unit for unit in cost.units if unit.is_root]
    root_reduced = sum(unit.gradient_nbytes for unit in root)
    in_flight = _window(cost.inner_units, 2, "gradient_nbytes")
    if not cost.copies_in_and_out:
        return root_reduced + in_flight
    # Gradients come in the compute dtype; the reduction's input is made when a unit is complete,
    # the root's at the very end.
    at_the_end = root_reduced + _window(cost.inner_units, 1, "gradient_nbytes")
    computed = sum(_computed_nbytes(unit) for unit in root)
    computed += max((_computed_nbytes(unit) for unit in cost.inner_units), default=0)
    return computed + max(in_flight, at_the_end)


def _computed_nbytes(unit: UnitCost) -> int:
    trained = [space for space in unit.spaces if space.trainable]
    return sum(s.format.gathered_nbytes(s.num_parameter_elements) for s in trained)
