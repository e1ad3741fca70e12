"""`shard`: from a model on one device to an engine over a mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from sshsdp.engine.agreement import agree
from sshsdp.engine.collect import ROOT, collect_slots, find_unit_modules, unit_of_slot
from sshsdp.engine.engine import Engine
from sshsdp.engine.materialize import holds_meta, materialize
from sshsdp.engine.packing import resolve_packs
from sshsdp.engine.patterns import check_patterns, first_match
from sshsdp.engine.space import ShardedSpace, plan_space
from sshsdp.engine.topology import Topology, resolve_mesh
from sshsdp.engine.unit import Unit
from sshsdp.formats.dense import DenseFormat
from sshsdp.policies import RuntimePolicy, UpdatePolicy
from sshsdp.stats import Stats

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from sshsdp.engine.collect import UnitRule
    from sshsdp.engine.slots import ParameterSlot

__all__ = ["shard"]


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
    unit_modules: dict[str, nn.Module] = {}
    packs: list[list[ParameterSlot]] = []
    error: Exception | None = None
    try:
        slots = collect_slots(model)
        unit_modules = find_unit_modules(model, units)
        check_patterns(
            runtime.formats, [alias for slot in slots for alias in slot.aliases], "formats"
        )
        unit_of = {slot: unit_of_slot(slot, unit_modules) for slot in slots}
        packs = resolve_packs(runtime.packs, slots, unit_of)
    except Exception as caught:
        error = caught
    agree(_describe(model, mesh, slots, unit_modules, runtime, update), error, "sshsdp.shard()")

    stats = Stats()
    topology = Topology.build(mesh, target, stats, update)
    builder = _Builder(model, topology, runtime, update, stats, packs)
    built = builder.build(slots, unit_modules)
    _place_buffers(model, topology)
    return Engine(model, built, topology, runtime, update, stats)


def _current_device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.accelerator.current_device_index())


def _describe(
    model: nn.Module,
    mesh: DeviceMesh,
    slots: list[ParameterSlot],
    unit_modules: dict[str, nn.Module],
    runtime: RuntimePolicy,
    update: UpdatePolicy,
) -> list[tuple[str, str]]:
    entries = [
        ("the mesh", str(mesh.mesh.tolist())),
        ("the runtime policy", repr(runtime)),
        ("the update policy", repr(update)),
        ("the units", str(list(unit_modules))),
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
    return entries


class _Builder:
    """Makes the units one after another, so that one unit at a time is held whole."""

    def __init__(
        self,
        model: nn.Module,
        topology: Topology,
        runtime: RuntimePolicy,
        update: UpdatePolicy,
        stats: Stats,
        packs: list[list[ParameterSlot]],
    ) -> None:
        self._model = model
        self._packs = packs
        self._topology = topology
        self._runtime = runtime
        self._update = update
        self._stats = stats
        from_rank_0: list[bool] = [holds_meta(model)]
        dist.broadcast_object_list(from_rank_0, group=topology.world.group, group_src=0)
        self._initializes = from_rank_0[0]

    def build(self, slots: list[ParameterSlot], unit_modules: dict[str, nn.Module]) -> list[Unit]:
        modules = {ROOT: self._model, **unit_modules}
        members: dict[str, list[ParameterSlot]] = {name: [] for name in modules}
        for slot in slots:
            members[unit_of_slot(slot, unit_modules)].append(slot)
        if self._initializes:
            materialize(self._model, list(self._model.modules()), [], self._topology.device)
        return [
            Unit(name, module, self._spaces(name, members[name]), is_root=name == ROOT)
            for name, module in modules.items()
            if members[name] or name == ROOT
        ]

    def _spaces(self, unit_name: str, slots: list[ParameterSlot]) -> list[ShardedSpace]:
        if self._initializes:
            materialize(self._model, [], slots, self._topology.device)
        groups: dict[tuple[bool, torch.dtype], list[ParameterSlot]] = {}
        for slot in slots:
            groups.setdefault((slot.requires_grad, self._runtime_dtype(slot)), []).append(slot)
        return [
            self._space(unit_name, members, trainable, dtype)
            for (trainable, dtype), members in groups.items()
        ]

    def _runtime_dtype(self, slot: ParameterSlot) -> torch.dtype:
        matches = [first_match(alias, self._runtime.formats) for alias in slot.aliases]
        chosen = next((m for m in matches if m is not None), DenseFormat(self._runtime.dtype))
        return chosen.runtime_dtype(slot.original_dtype)

    def _space(
        self, unit_name: str, slots: list[ParameterSlot], trainable: bool, dtype: torch.dtype
    ) -> ShardedSpace:
        topology = self._topology
        packs = [pack for pack in self._packs if pack[0] in slots]
        # Weights first: biases and norms usually form the group without weight decay.
        order = {slot: int(len(slot.shape) < 2) for slot in slots}
        layout = plan_space(slots, packs, order, dtype, topology)
        update_dtype = self._update.dtype or dtype
        values = None
        if topology.world.rank == 0:
            values = torch.zeros(
                layout.numel, dtype=update_dtype if trainable else dtype, device=topology.device
            )
            with torch.no_grad():
                for slot in slots:
                    region = layout.by_name[slot.name]
                    view = values.as_strided(region.shape, region.stride, region.start)
                    view.copy_(slot.parameter)
        space = ShardedSpace(
            layout,
            slots,
            unit_name=unit_name,
            trainable=trainable,
            runtime_dtype=dtype,
            update_dtype=update_dtype,
            reduce_dtype=self._update.reduce_dtype or update_dtype,
            topology=topology,
            stats=self._stats,
            packs=packs,
        )
        space.scatter(values)
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
