"""The layout that `sshsdp.shard` would give a model, without a process group.

The model may be on the meta device; it is not changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sshsdp.assembly.discovery import ROOT, collect_slots, find_unit_modules, unit_of_slot
from sshsdp.assembly.format_choice import choose_formats
from sshsdp.assembly.packing import resolve_packs
from sshsdp.assembly.patterns import check_patterns
from sshsdp.formats.mxfp8 import MXFP8Format
from sshsdp.formats.mxfp8_blocks import DATA_DTYPE
from sshsdp.layout.cuts import elements
from sshsdp.layout.layout import Layout
from sshsdp.layout.unit_plan import ParameterSpec, plan_unit

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    from sshsdp.assembly.discovery import UnitRule
    from sshsdp.layout.cuts import Cuts
    from sshsdp.parameters.slots import ParameterSlot
    from sshsdp.policies import RuntimePolicy, UpdatePolicy

__all__ = ["plan_layout", "specs_by_unit"]


def specs_by_unit(
    model: nn.Module,
    runtime: RuntimePolicy,
    *,
    units: UnitRule = None,
    cuts_of: Callable[[ParameterSlot, str], Cuts] | None = None,
    dtype_of: Callable[[ParameterSlot, str], torch.dtype | None] | None = None,
    is_owned: Callable[[ParameterSlot, str], bool] | None = None,
) -> dict[str, list[ParameterSpec]]:
    """The parameters of every unit, the root first.

    Args:
        model: The model; may be on meta.
        runtime: Gives each parameter its runtime format and its pack.
        units: As in `sshsdp.shard`.
        cuts_of: Parameter and unit name to where shards may cut it, whatever its format; default:
            anywhere.
        dtype_of: Parameter and unit name to another runtime dtype than the policy's, or None.
        is_owned: Parameter and unit name to whether it is updated as whole matrices; default: none
            is.
    """
    slots = collect_slots(model)
    modules = find_unit_modules(model, units)
    check_patterns(runtime.formats, [alias for slot in slots for alias in slot.aliases], "formats")
    unit_of = {slot: unit_of_slot(slot, modules) for slot in slots}
    packs = resolve_packs(runtime.packs, slots, unit_of)
    label = {slot: str(index) for index, pack in enumerate(packs) for slot in pack}
    members: dict[str, list[ParameterSpec]] = {ROOT: [], **{name: [] for name in modules}}
    # As in the engine, packs come first: their members follow one another in the packs' order.
    packed = [slot for pack in packs for slot in pack]
    choices = choose_formats(slots, unit_of, packs, runtime)
    for slot in [*packed, *(slot for slot in slots if slot not in label)]:
        chosen = choices[slot].runtime_format
        unit = unit_of[slot]
        dtype = dtype_of(slot, unit) if dtype_of is not None else None
        cuts = cuts_of(slot, unit) if cuts_of is not None else elements()
        if isinstance(chosen, MXFP8Format):
            dtype = dtype or DATA_DTYPE
            cuts = cuts.both(chosen.cuts(slot.shape))
        else:
            dtype = dtype or chosen.runtime_dtype(slot.original_dtype)
        members[unit].append(
            ParameterSpec(
                name=slot.name,
                shape=slot.shape,
                runtime_dtype=dtype,
                is_trainable=slot.requires_grad,
                cuts=cuts,
                pack=label.get(slot),
                is_owned=is_owned is not None and is_owned(slot, unit),
            )
        )
    return {name: specs for name, specs in members.items() if specs or name == ROOT}


def plan_layout(
    specs: dict[str, list[ParameterSpec]],
    *,
    num_replicas: int,
    num_shards: int,
    update: UpdatePolicy,
) -> Layout:
    """Plan all units over an R x S mesh.

    Args:
        specs: From `specs_by_unit`.
        num_replicas: R.
        num_shards: S.
        update: The update policy.
    """
    num_update_slices = num_replicas if update.sharding == "hierarchical" else 1
    return Layout(
        units=tuple(
            plan_unit(name, members, num_shards=num_shards, num_update_slices=num_update_slices)
            for name, members in specs.items()
        ),
        num_shards=num_shards,
        num_replicas=num_replicas,
    )
