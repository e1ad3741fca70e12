"""`shard`: from a model on one device to an engine over a mesh."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from sshsdp.assembly.discovery import ROOT, collect_slots, find_unit_modules, unit_of_slot
from sshsdp.assembly.format_choice import choose_formats, format_table
from sshsdp.assembly.materialize import holds_meta, materialize
from sshsdp.assembly.packing import resolve_packs
from sshsdp.assembly.patterns import check_patterns
from sshsdp.assembly.splits import resolve_splits
from sshsdp.comm.agreement import agree
from sshsdp.comm.topology import Topology, mesh_sizes, resolve_mesh
from sshsdp.engine.engine import Engine
from sshsdp.formats.dense import DenseFormat
from sshsdp.formats.mxfp8 import MXFP8Format
from sshsdp.formats.mxfp8_backends import choose_backend
from sshsdp.policies import RuntimePolicy, UpdatePolicy
from sshsdp.spaces.space import ShardedSpace, plan_space
from sshsdp.spaces.space_format import BlockSpaceFormat, DenseSpaceFormat
from sshsdp.spaces.unit import Unit
from sshsdp.stats import Stats

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from sshsdp.assembly.discovery import UnitRule
    from sshsdp.assembly.format_choice import FormatChoice
    from sshsdp.formats.mxfp8_gemm import GemmBackend
    from sshsdp.layout.address_space import AddressSpace
    from sshsdp.parameters.slots import ParameterSlot
    from sshsdp.spaces.space_format import SpaceFormat

__all__ = ["shard", "shard_without_values"]

logger = logging.getLogger(__name__)


def shard(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    units: UnitRule = None,
    runtime: RuntimePolicy | None = None,
    update: UpdatePolicy | None = None,
    *,
    device: torch.device | str | None = None,
) -> Engine:
    """Shard a model over a mesh, in place.

    Collective: every rank calls it with the same model and policies, which is checked. Rank 0's
    parameter and buffer values win; the other ranks' may be anything, or on the meta device.

    Args:
        model: On cpu, the accelerator or meta. Its parameters keep their names, shapes and
            identity.
        mesh: None for a 1-D mesh over the default group; else a 1-D mesh, or a 2-D one with
            ``mesh_dim_names=("replicate", "shard")``, over all ranks.
        units: What is gathered together. None: every child of every outermost ``nn.ModuleList``; or
            module classes and name patterns; or a callable ``(name, module) -> bool``. The rest of
            the model is the root unit, which stays gathered from its forward through backward.
        runtime: How runtime parameters look; default ``RuntimePolicy()``.
        update: How update parameters are kept; default ``UpdatePolicy()``.
        device: Where to train; default: the mesh's device type, this process's current device.

    Returns:
        The engine. Attach the optimizer with ``engine.attach`` before the first step.

    Raises:
        RuntimeError: No process group; the model is sharded already; the ranks differ.
        ValueError: A mesh that does not fit the world, an unknown pattern, a parameter that cannot
            be sharded.
    """
    return _build(model, mesh, units, runtime, update, device, takes_values=True)


def shard_without_values(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    units: UnitRule = None,
    runtime: RuntimePolicy | None = None,
    update: UpdatePolicy | None = None,
    *,
    device: torch.device | str | None = None,
) -> Engine:
    """`shard` for a caller that fills the parameters of a meta model itself.

    No parameter is ever whole. Buffers are initialised; parameters are zero until the caller has
    written them, by way of ``engine.model_state_dict()`` and ``engine.after_load()``.
    """
    return _build(model, mesh, units, runtime, update, device, takes_values=False)


def _build(
    model: nn.Module,
    mesh: DeviceMesh | None,
    units: UnitRule,
    runtime: RuntimePolicy | None,
    update: UpdatePolicy | None,
    device: torch.device | str | None,
    *,
    takes_values: bool,
) -> Engine:
    runtime = runtime or RuntimePolicy()
    update = update or UpdatePolicy()
    target = None if device is None else torch.device(device)
    mesh = resolve_mesh(mesh, target)
    if mesh.size() != dist.get_world_size():
        raise ValueError(
            f"the mesh has {mesh.size()} ranks and the world {dist.get_world_size()}: a mesh must "
            "cover all ranks"
        )
    target = target or _current_device(mesh.device_type)

    slots: list[ParameterSlot] = []
    plans: list[_UnitPlan] = []
    choices: dict[ParameterSlot, FormatChoice] = {}
    error: Exception | None = None
    try:
        slots = collect_slots(model)
        check_patterns(
            runtime.formats, [alias for slot in slots for alias in slot.aliases], "formats"
        )
        for slot, its_units in resolve_splits(update.splits, model, slots).items():
            slot.optimization_units = its_units
        unit_modules = find_unit_modules(model, units)
        unit_of = {slot: unit_of_slot(slot, unit_modules) for slot in slots}
        packs = resolve_packs(runtime.packs, slots, unit_of)
        choices = choose_formats(slots, unit_of, packs, runtime)
        formats = _space_formats(choices, runtime, target)
        modules = {ROOT: model, **unit_modules}
        plans = _plan_units(modules, unit_of, packs, formats, mesh_sizes(mesh, update))
    except Exception as caught:
        error = caught
    caller = "sshsdp.shard()" if takes_values else "sshsdp.from_pretrained()"
    agree(_describe(model, mesh, slots, plans, runtime, update), error, caller)

    stats = Stats()
    topology = Topology.build(mesh, target, stats.wire, update)
    _log_formats(choices, runtime)
    built = _Builder(model, topology, update, stats, takes_values=takes_values).build(plans)
    _place_buffers(model, topology)
    return Engine(model, built, topology, runtime, update, stats)


def _current_device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.accelerator.current_device_index())


@dataclass(frozen=True, slots=True, kw_only=True)
class _SpacePlan:
    """An address space that is to be built."""

    slots: list[ParameterSlot]
    packs: list[list[ParameterSlot]]
    trainable: bool
    space_format: SpaceFormat
    layout: AddressSpace


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnitPlan:
    """A unit that is to be built."""

    name: str
    module: nn.Module
    spaces: list[_SpacePlan]


def _space_formats(
    choices: Mapping[ParameterSlot, FormatChoice], runtime: RuntimePolicy, device: torch.device
) -> dict[ParameterSlot, SpaceFormat]:
    """What each parameter's space must be made as; equal ones may share a space."""
    dense = DenseFormat(runtime.dtype)
    backends: dict[tuple[MXFP8Format, torch.dtype], GemmBackend] = {}
    formats: dict[ParameterSlot, SpaceFormat] = {}
    for slot, (chosen, _) in choices.items():
        if isinstance(chosen, DenseFormat):
            formats[slot] = DenseSpaceFormat(chosen.runtime_dtype(slot.original_dtype))
            continue
        dtype = dense.runtime_dtype(slot.original_dtype)
        if (chosen, dtype) not in backends:
            backend = choose_backend(chosen.backend, device, chosen.rounding, dtype)
            backends[chosen, dtype] = backend
        formats[slot] = BlockSpaceFormat(dtype, chosen, backends[chosen, dtype])
    return formats


def _log_formats(choices: Mapping[ParameterSlot, FormatChoice], runtime: RuntimePolicy) -> None:
    if any(isinstance(choice.runtime_format, MXFP8Format) for choice in choices.values()):
        logger.info("runtime formats:\n%s", format_table(choices))
    elif runtime.format is not None:
        logger.warning(
            "RuntimePolicy(format='mxfp8') applies to no parameter:\n%s", format_table(choices)
        )


def _plan_units(
    modules: Mapping[str, nn.Module],
    unit_of: Mapping[ParameterSlot, str],
    packs: list[list[ParameterSlot]],
    formats: Mapping[ParameterSlot, SpaceFormat],
    sizes: tuple[int, int],
) -> list[_UnitPlan]:
    members: dict[str, list[ParameterSlot]] = {name: [] for name in modules}
    for slot, unit in unit_of.items():
        members[unit].append(slot)
    return [
        _UnitPlan(name=name, module=module, spaces=_plan_spaces(mine, packs, formats, sizes))
        for name, module in modules.items()
        if (mine := members[name]) or name == ROOT
    ]


def _plan_spaces(
    slots: list[ParameterSlot],
    packs: list[list[ParameterSlot]],
    formats: Mapping[ParameterSlot, SpaceFormat],
    sizes: tuple[int, int],
) -> list[_SpacePlan]:
    groups: dict[tuple[bool, SpaceFormat], list[ParameterSlot]] = {}
    for slot in slots:
        groups.setdefault((slot.requires_grad, formats[slot]), []).append(slot)
    plans = []
    for (trainable, space_format), members in groups.items():
        its_packs = [pack for pack in packs if pack[0] in members]
        # Weights first: biases and norms usually form the group without weight decay.
        order = {slot: int(len(slot.shape) < 2) for slot in members}
        layout = plan_space(
            members, its_packs, order, space_format, num_shards=sizes[0], num_update_slices=sizes[1]
        )
        plan = _SpacePlan(
            slots=members,
            packs=its_packs,
            trainable=trainable,
            space_format=space_format,
            layout=layout,
        )
        plans.append(plan)
    return plans


def _describe(
    model: nn.Module,
    mesh: DeviceMesh,
    slots: list[ParameterSlot],
    plans: list[_UnitPlan],
    runtime: RuntimePolicy,
    update: UpdatePolicy,
) -> list[tuple[str, str]]:
    entries = [
        ("the mesh", str(mesh.mesh.tolist())),
        ("the runtime policy", repr(runtime)),
        ("the update policy", repr(update)),
        ("the units", str([plan.name for plan in plans])),
    ]
    entries += [
        (
            f"parameter {slot.name!r}",
            f"of shape {slot.shape}, {slot.original_dtype}, "
            f"requires_grad={slot.requires_grad}, tied names {slot.aliases[1:]}",
        )
        for slot in slots
    ]
    entries += [
        (f"buffer {name!r}", f"of shape {tuple(buffer.shape)}, {buffer.dtype}")
        for name, buffer in model.named_buffers()
    ]
    entries += [
        (f"unit {plan.name!r}", f"laid out as {[space.layout for space in plan.spaces]}")
        for plan in plans
    ]
    return entries


class _Builder:
    """Makes the units one after another, so that one unit at a time is held whole."""

    def __init__(
        self,
        model: nn.Module,
        topology: Topology,
        update: UpdatePolicy,
        stats: Stats,
        *,
        takes_values: bool,
    ) -> None:
        self._model = model
        self._topology = topology
        self._update = update
        self._stats = stats
        self._takes_values = takes_values
        from_rank_0: list[bool] = [holds_meta(model)]
        dist.broadcast_object_list(from_rank_0, group=topology.world.group, group_src=0)
        self._initializes = from_rank_0[0]

    def build(self, plans: list[_UnitPlan]) -> list[Unit]:
        if self._initializes:
            materialize(self._model, list(self._model.modules()), [], self._topology.device)
        return [
            Unit(plan.name, plan.module, self._spaces(plan), is_root=plan.name == ROOT)
            for plan in plans
        ]

    def _spaces(self, plan: _UnitPlan) -> list[ShardedSpace]:
        if self._initializes and self._takes_values:
            slots = [slot for space in plan.spaces for slot in space.slots]
            materialize(self._model, [], slots, self._topology.device)
        return [self._space(plan.name, space) for space in plan.spaces]

    def _space(self, unit_name: str, plan: _SpacePlan) -> ShardedSpace:
        topology, layout, dtype = self._topology, plan.layout, plan.space_format.dtype
        update_dtype = self._update.dtype or dtype
        values = None
        if self._takes_values and topology.world.rank == 0:
            kept_dtype = update_dtype if plan.trainable else dtype
            values = torch.zeros(layout.numel, dtype=kept_dtype, device=topology.device)
            with torch.no_grad():
                for slot in plan.slots:
                    region = layout.by_name[slot.name]
                    view = values.as_strided(region.shape, region.stride, region.start)
                    view.copy_(slot.parameter)
        space = ShardedSpace(
            layout,
            plan.slots,
            unit_name=unit_name,
            trainable=plan.trainable,
            space_format=plan.space_format,
            update_dtype=update_dtype,
            reduce_dtype=self._update.reduce_dtype or update_dtype,
            topology=topology,
            stats=self._stats,
            packs=plan.packs,
        )
        if self._takes_values:
            space.scatter(values)
        else:
            space.clear()
        return space


def _place_buffers(model: nn.Module, topology: Topology) -> None:
    """Move buffers to the device and give every rank rank 0's values."""
    seen: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if buffer not in seen:
                placed = (
                    torch.empty_like(buffer, device=topology.device)
                    if buffer.is_meta
                    else buffer.to(topology.device).contiguous()
                )
                topology.world.broadcast(placed, name)
                seen[buffer] = placed
            module._buffers[name] = seen[buffer]
