"""The layout that `sshsdp.shard` would give a model, without a process group.

The model may be on the meta device; it is not changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sshsdp.engine.collect import ROOT, collect_slots, find_unit_modules, unit_of_slot
from sshsdp.engine.patterns import check_patterns, first_match
from sshsdp.formats.dense import DenseFormat
from sshsdp.layout.cuts import elements
from sshsdp.layout.layout import Layout
from sshsdp.layout.unit_plan import ParameterSpec, plan_unit

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    from sshsdp.engine.collect import UnitRule
    from sshsdp.engine.slots import ParameterSlot
    from sshsdp.layout.cuts import Cuts
    from sshsdp.policies import RuntimePolicy, UpdatePolicy

__all__ = ["plan_layout", "specs_by_unit"]


def specs_by_unit(
    model: nn.Module,
    runtime: RuntimePolicy,
    *,
    units: UnitRule = None,
    cuts_of: Callable[[ParameterSlot], Cuts] | None = None,
    dtype_of: Callable[[ParameterSlot], torch.dtype | None] | None = None,
) -> dict[str, list[ParameterSpec]]:
    """The parameters of every unit, the root first.

    Args:
        model: The model.
        runtime: Gives each parameter its runtime dtype.
        units: As in `sshsdp.shard`.
        cuts_of: Where shards may cut a parameter; default: anywhere.
        dtype_of: Another runtime dtype than the policy's for some parameters.
    """
    slots = collect_slots(model)
    modules = find_unit_modules(model, units)
    check_patterns(runtime.formats, [alias for slot in slots for alias in slot.aliases], "formats")
    members: dict[str, list[ParameterSpec]] = {ROOT: [], **{name: [] for name in modules}}
    for slot in slots:
        dtype = dtype_of(slot) if dtype_of is not None else None
        members[unit_of_slot(slot, modules)].append(
            ParameterSpec(
                name=slot.name,
                shape=slot.shape,
                runtime_dtype=dtype or _policy_dtype(slot, runtime),
                is_trainable=slot.requires_grad,
                cuts=cuts_of(slot) if cuts_of is not None else elements(),
            )
        )
    return {name: specs for name, specs in members.items() if specs or name == ROOT}


def _policy_dtype(slot: ParameterSlot, runtime: RuntimePolicy) -> torch.dtype:
    matches = [first_match(alias, runtime.formats) for alias in slot.aliases]
    chosen = next((match for match in matches if match is not None), DenseFormat(runtime.dtype))
    return chosen.runtime_dtype(slot.original_dtype)


def plan_layout(
    model: nn.Module,
    *,
    num_replicas: int,
    num_shards: int,
    runtime: RuntimePolicy,
    update: UpdatePolicy,
    units: UnitRule = None,
    cuts_of: Callable[[ParameterSlot], Cuts] | None = None,
    dtype_of: Callable[[ParameterSlot], torch.dtype | None] | None = None,
) -> Layout:
    """Plan all units over an R x S mesh.

    Args:
        model: The model; may be on meta.
        num_replicas: R.
        num_shards: S.
        runtime: The runtime policy.
        update: The update policy.
        units: As in `sshsdp.shard`.
        cuts_of: Where shards may cut a parameter; default: anywhere.
        dtype_of: Another runtime dtype than the policy's for some parameters.
    """
    specs = specs_by_unit(model, runtime, units=units, cuts_of=cuts_of, dtype_of=dtype_of)
    num_update_slices = num_replicas if update.sharding == "hierarchical" else 1
    return Layout(
        units=tuple(
            plan_unit(name, members, num_shards=num_shards, num_update_slices=num_update_slices)
            for name, members in specs.items()
        ),
        num_shards=num_shards,
        num_replicas=num_replicas,
    )
