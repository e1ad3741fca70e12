"""Time of one optimizer step, from work, traffic and hardware.

A roofline of the schedule, unit by unit. While a unit runs forward, the next one is gathered over
``shard`` and refreshed over ``replicate``; while it runs backward, the next one is gathered and the
last one's gradients are reduced. Each axis has its own link, so a unit takes the longest of its
arithmetic and its traffic on either axis. What nothing hides is added: the first gather, the last
reduction, the optimizer's memory traffic and arithmetic, the way back of matrices from their owners
(the peers: gathering them), and, for schemes that copy in and out, those copies.

The result is a prediction for comparing choices, not a promise: host time, stragglers and traffic
of other jobs are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sshsdp.estimate.costs import ModelCost, SpaceCost, UnitCost
    from sshsdp.estimate.hardware import Hardware
    from sshsdp.estimate.memory import RankMemory
    from sshsdp.estimate.optimizers import OptimizerCost
    from sshsdp.estimate.work import ModelWork

__all__ = ["Batch", "StepTime", "step_time"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one rank works on in a step.

    Attributes:
        size: Sequences in a micro-batch.
        sequence: Tokens in a sequence.
        num_micro_batches: Micro-batches per step.
        is_checkpointed: Activations are recomputed block by block.
    """

    size: int
    sequence: int
    num_micro_batches: int = 1
    is_checkpointed: bool = False

    def __post_init__(self) -> None:
        """Refuse empty batches."""
        for name in ("size", "sequence", "num_micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"batch: {name} must be 1 or more, got {getattr(self, name)}")

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank."""
        return self.size * self.sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        compute: Arithmetic alone.
        exposed: Communication that nothing hides.
        copies: Copies into and out of communication buffers.
        optimizer: The optimizer and publish.
        mfu: The model's own operations over the dense bf16 peak, whatever the format.
        tokens_per_second: Of one rank.
    """

    compute: float
    exposed: float
    copies: float
    optimizer: float
    mfu: float
    tokens_per_second: float

    @property
    def total(self) -> float:
        """The whole step."""
        return self.compute + self.exposed + self.copies + self.optimizer


class _Links:
    """Seconds that bytes take on each axis."""

    def __init__(self, cost: ModelCost, hardware: Hardware) -> None:
        self._latency = hardware.latency
        self._shard = hardware.axis_bandwidth(cost.num_shards, 1)
        self._replicate = hardware.axis_bandwidth(cost.num_replicas, cost.num_shards)
        self._num_shards = cost.num_shards
        self._num_replicas = cost.num_replicas

    def shard(self, whole: int) -> float:
        """An all-gather or reduce-scatter of ``whole`` bytes over the shard axis."""
        return self._seconds(whole, self._num_shards, self._shard)

    def replicate(self, whole: int, rounds: int = 1) -> float:
        """The same over the replicate axis; an all-reduce is two rounds."""
        return rounds * self._seconds(whole, self._num_replicas, self._replicate)

    def _seconds(self, whole: int, num_ranks: int, bandwidth: float) -> float:
        if num_ranks == 1 or whole == 0:
            return 0.0
        return whole * (num_ranks - 1) / num_ranks / bandwidth + self._latency


def step_time(
    cost: ModelCost,
    work: ModelWork,
    memory: RankMemory,
    hardware: Hardware,
    batch: Batch,
    optimizer: OptimizerCost,
    *,
    uses_mxfp8: bool = False,
) -> StepTime:
    """Predict a step under a scheme.

    Args:
        cost: The model under the scheme.
        work: What a token costs.
        memory: Memory of a rank, of which the optimizer reads and writes its part.
        hardware: What runs it.
        batch: What a rank works on.
        optimizer: What its arithmetic is.
        uses_mxfp8: Matrix products run in MXFP8, where the hardware has it.
    """
    links = _Links(cost, hardware)
    seconds_per_flop = 1 / (hardware.flops(uses_mxfp8=uses_mxfp8) * hardware.gemm_efficiency)
    forwards = [work.unit_flops(u.name, batch.sequence) * batch.tokens for u in cost.units]
    forwards = [flops * seconds_per_flop for flops in forwards]
    factor = 3.0 if batch.is_checkpointed else 2.0
    backwards = [seconds * factor for seconds in forwards]
    compute = exposed = 0.0
    for index in range(batch.num_micro_batches):
        is_last = index == batch.num_micro_batches - 1
        exposed += _exposed_forward(cost, links, forwards, refreshes=index == 0)
        exposed += _exposed_backward(cost, links, backwards, reduces=is_last)
        compute += sum(forwards) + sum(backwards)
    copies = _copied_nbytes(cost, batch.num_micro_batches) / hardware.memory_bandwidth
    exposed += _matrices_seconds(cost, links)
    updating = _optimizer_seconds(cost, memory, hardware)
    updating += _update_flops(cost, optimizer) / (hardware.dense_flops * hardware.gemm_efficiency)
    total = compute + exposed + copies + updating
    tokens = batch.tokens * batch.num_micro_batches
    return StepTime(
        compute=compute,
        exposed=exposed,
        copies=copies,
        optimizer=updating,
        mfu=work.step_flops(batch.sequence) * tokens / total / hardware.dense_flops,
        tokens_per_second=tokens / total,
    )


def _gather_seconds(cost: ModelCost, links: _Links, unit: UnitCost, *, again: bool) -> float:
    spaces = [s for s in unit.spaces if not again or cost.is_regathered(unit, s)]
    return sum(links.shard(space.format.gathered_nbytes(space.numel)) for space in spaces)


def _refresh_seconds(cost: ModelCost, links: _Links, unit: UnitCost) -> float:
    if cost.num_update_slices == 1:
        return 0.0
    shards = [
        space.format.stored_nbytes(space.numel // cost.num_shards)
        for space in unit.spaces
        if space.trainable and not space.needs_whole
    ]
    return sum(links.replicate(shard) for shard in shards)


def _exposed_forward(
    cost: ModelCost, links: _Links, forwards: list[float], *, refreshes: bool
) -> float:
    """Communication that outlasts the arithmetic, the root and the first block being first."""
    shard = [_gather_seconds(cost, links, unit, again=False) for unit in cost.units]
    replicate = [_refresh_seconds(cost, links, unit) if refreshes else 0.0 for unit in cost.units]
    first = min(len(cost.units), 2)
    exposed = max(sum(shard[:first]), sum(replicate[:first]))
    for index in range(1, len(cost.units)):
        following = slice(index + 1, index + 2)
        traffic = max(sum(shard[following]), sum(replicate[following]))
        exposed += max(traffic - forwards[index], 0.0)
    return exposed


def _reduce_seconds(cost: ModelCost, links: _Links, unit: UnitCost) -> tuple[float, float]:
    shard = replicate = 0.0
    for space in unit.spaces:
        if space.trainable:
            gradient = space.numel * space.reduce_itemsize
            shard += links.shard(gradient)
            rounds = 1 if cost.num_update_slices > 1 else 2
            replicate += links.replicate(gradient // cost.num_shards, rounds)
            if space.needs_whole and cost.has_owners:
                shard += links.shard(gradient // cost.num_shards // cost.num_update_slices)
    return shard, replicate


def _exposed_backward(
    cost: ModelCost, links: _Links, backwards: list[float], *, reduces: bool
) -> float:
    """The same in backward: the next gather and the last reduction share the shard axis."""
    exposed = 0.0
    pending = (0.0, 0.0)
    for index in range(len(cost.units) - 1, 0, -1):
        gather = 0.0
        if index > 1:
            gather = _gather_seconds(cost, links, cost.units[index - 1], again=True)
        traffic = max(gather + pending[0], pending[1])
        exposed += max(traffic - backwards[index], 0.0)
        pending = _reduce_seconds(cost, links, cost.units[index]) if reduces else (0.0, 0.0)
    # The root is reduced last, after the first block's reduction.
    last = _reduce_seconds(cost, links, cost.units[0]) if reduces else (0.0, 0.0)
    return exposed + max(pending[0] + last[0], pending[1] + last[1])


def _matrices_seconds(cost: ModelCost, links: _Links) -> float:
    """New values from the owners of whole matrices; or the gathers that bring all to every rank."""
    seconds = 0.0
    for space in cost.spaces:
        if not space.needs_whole:
            continue
        if not cost.has_owners:
            seconds += links.shard(space.num_parameter_elements * space.update_itemsize)
            continue
        shard = space.num_parameter_elements // cost.num_shards * space.returned_itemsize
        seconds += links.shard(shard // cost.num_update_slices)
        if cost.num_update_slices > 1:
            seconds += links.replicate(shard)
    return seconds


def _update_flops(cost: ModelCost, optimizer: OptimizerCost) -> float:
    """Matrix operations of the optimizer on one rank."""
    flops = sum(
        optimizer.flops(shape, not unit.is_root)
        for unit in cost.units
        for space in unit.spaces
        if space.trainable
        for shape in space.shapes
    )
    return flops / (cost.num_shards * cost.num_update_slices) if cost.has_owners else flops


def _copied_nbytes(cost: ModelCost, num_micro_batches: int) -> float:
    """Bytes read and written by copies around collectives: FSDP2's copy-in, copy-out, chunk_cat."""
    if not cost.copies_in_and_out:
        return 0.0
    copied = 0.0
    for unit in cost.units:
        for space in unit.spaces:
            gathered = space.format.gathered_nbytes(space.numel)
            num_gathers = num_micro_batches * (1 + cost.is_regathered(unit, space))
            read_masters = space.numel // cost.num_shards * space.update_itemsize
            copied += num_gathers * (2 * gathered + read_masters + gathered // cost.num_shards)
            if space.trainable:
                copied += gathered + space.numel * space.reduce_itemsize
    return copied


def _optimizer_seconds(cost: ModelCost, memory: RankMemory, hardware: Hardware) -> float:
    """Masters and state are read and written, gradients read, runtime values written.

    On the host this takes the host's memory, and the values go up once all are there. Gradients
    come down while backward still runs.
    """
    num_parts = cost.num_shards * cost.num_update_slices
    published = 0
    if cost.has_runtime_shards:
        published = sum(_published_nbytes(space, num_parts) for space in cost.spaces)
    moved = 2 * memory.optimizer_state + memory.sharded_gradients + 2 * memory.masters
    if cost.is_offloaded:
        return moved / hardware.host_memory_bandwidth + published / hardware.host_bandwidth
    return (moved + published) / hardware.memory_bandwidth


def _published_nbytes(space: SpaceCost, num_parts: int) -> int:
    if not space.trainable:
        return 0
    written = space.format.stored_nbytes(space.numel // num_parts)
    # Shared memory is updated in place, which reads it too.
    return 2 * written if space.is_shared else written
