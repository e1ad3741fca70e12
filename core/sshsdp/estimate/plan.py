"""The whole prediction for one model on one mesh, beside the peers'."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sshsdp.assembly.discovery import ROOT
from sshsdp.estimate.costs import ModelCost, model_cost
from sshsdp.estimate.memory import RankMemory, rank_memory
from sshsdp.estimate.peers import fsdp2_cost, hsdp_cost
from sshsdp.estimate.planning import plan_layout, specs_by_unit
from sshsdp.estimate.step_time import StepTime, step_time
from sshsdp.estimate.wire import axis_bytes, wire_bytes
from sshsdp.estimate.work import ModelWork, model_work
from sshsdp.layout.cuts import elements
from sshsdp.layout.report import PlanReport, report_plan
from sshsdp.layout.unit_plan import alignment_of, group_by_space, requests_of
from sshsdp.policies import RuntimePolicy, UpdatePolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sshsdp.assembly.discovery import UnitRule
    from sshsdp.estimate.hardware import Hardware
    from sshsdp.estimate.optimizers import OptimizerCost
    from sshsdp.estimate.step_time import Batch
    from sshsdp.layout.cuts import Cuts
    from sshsdp.layout.layout import Layout, UnitLayout
    from sshsdp.layout.unit_plan import ParameterSpec
    from sshsdp.packs import Pack
    from sshsdp.parameters.slots import ParameterSlot

__all__ = ["FORMATS", "Plan", "Scheme", "UnitRow", "make_plan"]

# Compute dtypes by the name that --format takes.
FORMATS: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "mxfp8": torch.bfloat16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One way to shard the model.

    Attributes:
        cost: Sizes and formats.
        memory: Memory of a rank.
        wire: Bytes that a rank receives per step, by ``"<axis>/<collective>"``.
        time: Prediction of a step; None without a batch.
    """

    cost: ModelCost
    memory: RankMemory
    wire: dict[str, int]
    time: StepTime | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        memory = {
            **dataclasses.asdict(self.memory),
            "total": self.memory.total,
            "on_host": self.memory.on_host,
        }
        axes = {axis: axis_bytes(self.wire, axis) for axis in ("shard", "replicate", "world")}
        time = self.time
        return {
            "mesh": [self.cost.num_replicas, self.cost.num_shards],
            "padding_share": self.cost.padding / max(self.cost.num_parameter_elements, 1),
            "memory_bytes": memory,
            "wire_bytes": self.wire,
            "wire_bytes_by_axis": axes,
            "step": None if time is None else {**dataclasses.asdict(time), "total": time.total},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRow:
    """Units that are laid out alike.

    Attributes:
        names: Their names.
        layout: The layout of the first one.
        reports: What each of its address spaces costs.
    """

    names: tuple[str, ...]
    layout: UnitLayout
    reports: tuple[PlanReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A prediction.

    Attributes:
        model_name: For titles.
        layout: What the engine would build.
        rows: Its units, alike ones together.
        optimizer: Name of the optimizer.
        runtime_format: Name of the runtime format.
        hardware: What runs it.
        batch: What a rank works on; None if only memory and bytes are wanted.
        schemes: Ours first, then FSDP2 and, on a 2-D mesh, classic HSDP.
        notes: What the numbers leave out.
    """

    model_name: str
    layout: Layout
    rows: tuple[UnitRow, ...]
    optimizer: str
    runtime_format: str
    hardware: Hardware
    batch: Batch | None
    schemes: tuple[Scheme, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "model": self.model_name,
            "num_parameters": self.schemes[0].cost.num_parameter_elements,
            "mesh": [self.layout.num_replicas, self.layout.num_shards],
            "optimizer": self.optimizer,
            "format": self.runtime_format,
            "hardware": dataclasses.asdict(self.hardware),
            "batch": None if self.batch is None else dataclasses.asdict(self.batch),
            "units": [
                {
                    "names": list(row.names),
                    "spaces": [
                        {
                            "dtype": str(dtype).removeprefix("torch."),
                            "trainable": trainable,
                            "owned": owned,
                            "numel": report.numel,
                            "padding": report.padding,
                            "padding_share": report.padding_share,
                            "is_minimal": report.is_minimal,
                            "transposed": [r.name for r in space.regions if r.transposed],
                            "note": str(report),
                        }
                        for dtype, trainable, owned, report, space in zip(
                            row.layout.runtime_dtypes,
                            row.layout.trainable,
                            row.layout.owned,
                            row.reports,
                            row.layout.spaces,
                            strict=True,
                        )
                    ],
                }
                for row in self.rows
            ],
            "notes": list(self.notes),
            "schemes": {scheme.cost.scheme: scheme.to_dict() for scheme in self.schemes},
        }


def make_plan(
    model: nn.Module,
    *,
    model_name: str,
    mesh: tuple[int, int],
    optimizer: OptimizerCost,
    runtime_format: str,
    hardware: Hardware,
    batch: Batch | None = None,
    update: UpdatePolicy | None = None,
    units: UnitRule = None,
    packs: Sequence[Pack] = (),
) -> Plan:
    """Predict memory, traffic and time.

    Args:
        model: The model, best on the meta device.
        model_name: For titles.
        mesh: ``(R, S)``.
        optimizer: The optimizer.
        runtime_format: A key of `FORMATS`.
        hardware: What runs it.
        batch: What a rank works on; None to leave time and activations out.
        update: The update policy.
        units: As in `sshsdp.shard`.
        packs: As in `sshsdp.RuntimePolicy`.

    Raises:
        ValueError: An unknown format, or a mesh of less than one rank; units or packs that the
            model does not have.
    """
    if runtime_format not in FORMATS:
        raise ValueError(f"unknown format {runtime_format!r}; known: {', '.join(FORMATS)}")
    num_replicas, num_shards = mesh
    if num_replicas < 1 or num_shards < 1:
        raise ValueError(f"the mesh must have at least one rank per axis, got {mesh}")
    dense = RuntimePolicy(dtype=FORMATS[runtime_format], packs=packs)
    runtime = replace(dense, format="mxfp8") if runtime_format == "mxfp8" else dense
    update = update or UpdatePolicy()

    def cuts_of(slot: ParameterSlot, unit: str) -> Cuts:
        return optimizer.cuts(slot.shape) if slot.requires_grad else elements()

    def is_owned(slot: ParameterSlot, unit: str) -> bool:
        return slot.requires_grad and optimizer.needs_whole(slot.shape, unit != ROOT)

    specs = specs_by_unit(model, runtime, units=units, cuts_of=cuts_of, is_owned=is_owned)
    layout = plan_layout(specs, num_replicas=num_replicas, num_shards=num_shards, update=update)
    costs = [model_cost(layout, runtime, update)]
    theirs = specs_by_unit(model, dense, units=units, is_owned=is_owned)
    costs += _peer_costs(theirs, mesh, dense, update)
    estimator = _Estimator(
        optimizer=optimizer,
        hardware=hardware,
        batch=batch,
        work=model_work(model, units=units) if batch is not None else None,
        runtime_format=runtime_format,
    )
    return Plan(
        model_name=model_name,
        layout=layout,
        rows=_rows(layout, specs, update),
        optimizer=optimizer.name,
        runtime_format=runtime_format,
        hardware=hardware,
        batch=batch,
        schemes=tuple(estimator.scheme(cost) for cost in costs),
        notes=estimator.notes,
    )


def _peer_costs(
    specs: dict[str, list[ParameterSpec]],
    mesh: tuple[int, int],
    runtime: RuntimePolicy,
    update: UpdatePolicy,
) -> list[ModelCost]:
    num_replicas, num_shards = mesh
    costs = [fsdp2_cost(specs, num_ranks=num_replicas * num_shards, runtime=runtime, update=update)]
    if num_replicas > 1:
        costs.append(
            hsdp_cost(
                specs,
                num_replicas=num_replicas,
                num_shards=num_shards,
                runtime=runtime,
                update=update,
            )
        )
    return costs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Estimator:
    """What is the same for all schemes."""

    optimizer: OptimizerCost
    hardware: Hardware
    batch: Batch | None
    work: ModelWork | None
    runtime_format: str

    @property
    def activations(self) -> int | None:
        """Bytes of activations; None without a batch, or if too little is known of the model."""
        if self.work is None or self.batch is None:
            return None
        return self.work.activation_bytes(
            batch=self.batch.size,
            sequence=self.batch.sequence,
            itemsize=FORMATS[self.runtime_format].itemsize,
            is_checkpointed=self.batch.is_checkpointed,
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What the numbers leave out."""
        notes = []
        if self.batch is not None and self.activations is None:
            notes.append("Activations and attention: the model has no Hugging Face config.")
        if self.optimizer.granularity == "matrix":
            notes.append(
                f"{self.optimizer.name}: here on owners; the peers gather every matrix on every "
                "rank."
            )
        return tuple(notes)

    def scheme(self, cost: ModelCost) -> Scheme:
        num_micro_batches = self.batch.num_micro_batches if self.batch is not None else 1
        memory = rank_memory(
            cost,
            self.optimizer,
            num_micro_batches=num_micro_batches,
            activations=self.activations or 0,
        )
        time = None
        if self.work is not None and self.batch is not None:
            time = step_time(
                cost,
                self.work,
                memory,
                self.hardware,
                self.batch,
                self.optimizer,
                uses_mxfp8=self.runtime_format == "mxfp8",
            )
        wire = wire_bytes(cost, num_micro_batches=num_micro_batches)
        return Scheme(cost=cost, memory=memory, wire=wire, time=time)


def _rows(
    layout: Layout, specs: dict[str, list[ParameterSpec]], update: UpdatePolicy
) -> tuple[UnitRow, ...]:
    """Units that differ in nothing but their names, together."""
    num_update_slices = layout.num_replicas if update.sharding == "hierarchical" else 1
    alike: dict[Any, list[UnitLayout]] = {}
    for unit in layout.units:
        key = (
            unit.runtime_dtypes,
            unit.trainable,
            unit.owned,
            tuple(
                tuple((r.start, r.shape, r.transposed) for r in space.regions)
                for space in unit.spaces
            ),
        )
        alike.setdefault(key, []).append(unit)
    return tuple(
        UnitRow(
            names=tuple(unit.name for unit in units),
            layout=units[0],
            reports=tuple(
                report_plan(
                    requests_of(members),
                    space,
                    alignment=alignment_of(members[0].runtime_dtype),
                    num_update_slices=1 if members[0].is_owned else num_update_slices,
                )
                for space, members in zip(
                    units[0].spaces, group_by_space(specs[units[0].name]), strict=True
                )
            ),
        )
        for units in alike.values()
    )
