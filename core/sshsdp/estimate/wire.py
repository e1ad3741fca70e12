"""Bytes that a rank receives in one optimizer step, by mesh axis and collective.

The convention is the one of `engine.stats`: an all-gather or a reduce-scatter of ``n`` ranks brings
each of them ``(n - 1) / n`` of the whole buffer, an all-reduce twice that.

Per unit and step, ``P`` being its elements:

==================================  ==========================================  ===============
phase                               collective                                  bytes received
==================================  ==========================================  ===============
forward, each micro-batch           all-gather over shard, runtime format       P (S - 1) / S
backward, each micro-batch          the same again, unless the unit was kept    P (S - 1) / S
backward, last micro-batch          reduce-scatter over shard, reduce dtype     P (S - 1) / S
the same, hierarchical              reduce-scatter over replicate, of the shard P/S (R - 1) / R
the same, replicated                all-reduce over replicate, of the shard     2 P/S (R - 1) / R
before the next forward             all-gather over replicate, runtime format   P/S (R - 1) / R
==================================  ==========================================  ===============

Whole matrices on owners have, instead of the last three (means over ranks; ``U`` is ``R``, or 1
with replicated updates, where the all-reduce stays):

==================================  ==========================================  ===============
after the reduce-scatter            all-to-all over replicate, reduce dtype     P/S (R - 1) / R
after that                          all-to-all over shard, reduce dtype         P/S (S - 1) / S U
after the optimizer                 all-to-all over shard, runtime format       P/S (S - 1) / S U
after that                          all-to-all over replicate, runtime format   P/S (R - 1) / R
==================================  ==========================================  ===============

MXFP8 values come back from owners in the masters' dtype, to be quantized where they arrive.

Beside these, once per step, one flag (4 bytes) for each trained parameter is all-reduced over all
ranks, and gradient clipping all-reduces one number over each axis that divides gradients. The
first step also exchanges Python objects (the order of the units), which `engine.stats` leaves out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sshsdp.estimate.costs import model_cost

if TYPE_CHECKING:
    from sshsdp.estimate.costs import ModelCost, SpaceCost
    from sshsdp.layout.layout import Layout
    from sshsdp.policies import RuntimePolicy, UpdatePolicy

__all__ = ["axis_bytes", "expected_wire_bytes", "wire_bytes"]

_FLAG_NBYTES = 4


def expected_wire_bytes(
    layout: Layout,
    runtime: RuntimePolicy,
    update: UpdatePolicy,
    *,
    num_micro_batches: int = 1,
    clips_gradients: bool = False,
) -> dict[str, int]:
    """What ``engine.stats.wire.nbytes`` must hold after a step, from the second one on.

    For a model that calls every unit once per forward, in the order of registration.

    Args:
        layout: ``engine.layout``.
        runtime: The engine's runtime policy.
        update: The engine's update policy.
        num_micro_batches: Forward and backward passes per step, all but the last one under
            ``engine.no_sync()``.
        clips_gradients: Whether the step calls ``engine.clip_grad_norm_`` once.

    Returns:
        Bytes by ``"<axis>/<collective>"``; kinds without traffic are left out.
    """
    return wire_bytes(
        model_cost(layout, runtime, update),
        num_micro_batches=num_micro_batches,
        clips_gradients=clips_gradients,
    )


def wire_bytes(
    cost: ModelCost, *, num_micro_batches: int = 1, clips_gradients: bool = False
) -> dict[str, int]:
    """Bytes that each rank receives in a step, by ``"<axis>/<collective>"``."""
    found: dict[str, int] = {}

    def add(kind: str, nbytes: int) -> None:
        if nbytes:
            found[kind] = found.get(kind, 0) + nbytes

    for unit in cost.units:
        for space in unit.spaces:
            num_gathers = num_micro_batches * (1 + cost.is_regathered(unit, space))
            whole = space.format.gathered_nbytes(space.numel)
            add("shard/all_gather", num_gathers * _foreign(whole, cost.num_shards))
            if space.trainable:
                for kind, nbytes in _update_bytes(cost, space).items():
                    add(kind, nbytes)
    num_trained = sum(len(space.shapes) for space in cost.spaces if space.trainable)
    if cost.agrees_on_unused:
        add("world/all_reduce", _all_reduced(num_trained * _FLAG_NBYTES, cost.num_ranks))
    if clips_gradients and num_trained:
        itemsize = max(space.update_itemsize for space in cost.spaces if space.trainable)
        add("shard/all_reduce", _all_reduced(itemsize, cost.num_shards))
        if cost.num_update_slices > 1:
            add("replicate/all_reduce", _all_reduced(itemsize, cost.num_replicas))
    return found


def _update_bytes(cost: ModelCost, space: SpaceCost) -> dict[str, int]:
    """Gradients to the update shards, and new values back."""
    gradient = space.numel * space.reduce_itemsize
    shard = gradient // cost.num_shards
    found = {"shard/reduce_scatter": _foreign(gradient, cost.num_shards)}
    if space.needs_whole and cost.has_owners:
        return {**found, **_owned_bytes(cost, space)}
    if space.needs_whole:
        whole = space.num_parameter_elements * space.update_itemsize
        found["shard/all_gather"] = _foreign(whole, cost.num_shards)
    if cost.num_update_slices > 1:
        found["replicate/reduce_scatter"] = _foreign(shard, cost.num_replicas)
        stored = space.format.stored_nbytes(space.numel // cost.num_shards)
        found["replicate/all_gather"] = _foreign(stored, cost.num_replicas)
    else:
        found["replicate/all_reduce"] = _all_reduced(shard, cost.num_replicas)
    return found


def _owned_bytes(cost: ModelCost, space: SpaceCost) -> dict[str, int]:
    """What owners get and give back; padding does not travel."""
    numel = space.num_parameter_elements // cost.num_shards
    nbytes = numel * (space.reduce_itemsize + space.returned_itemsize)
    found = {"shard/all_to_all": _foreign(nbytes // cost.num_update_slices, cost.num_shards)}
    if cost.num_update_slices > 1:
        found["replicate/all_to_all"] = _foreign(nbytes, cost.num_replicas)
    else:
        reduced = numel * space.reduce_itemsize
        found["replicate/all_reduce"] = _all_reduced(reduced, cost.num_replicas)
    return found


def _foreign(whole: int, num_ranks: int) -> int:
    return whole - whole // num_ranks


def _all_reduced(whole: int, num_ranks: int) -> int:
    return 2 * whole * (num_ranks - 1) // num_ranks


def axis_bytes(nbytes_by_kind: dict[str, int], axis: str) -> int:
    """The bytes over one mesh axis."""
    return sum(n for kind, n in nbytes_by_kind.items() if kind.startswith(f"{axis}/"))
