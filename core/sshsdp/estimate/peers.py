"""FSDP2, classic HSDP and Megatron-FSDP v2 under the same model: padding, memory, traffic.

* FSDP2 shards every parameter along its first dim, in chunks of whole rows, over all ranks. Padding
  is what the longest chunk has too many. Masters are the shards; each gather casts them to the
  compute dtype, and its result, like the gradients, goes through communication buffers by copies.
* Classic HSDP is FSDP2 on the 2-D mesh: sharded over ``shard``, gradients all-reduced over
  ``replicate``, optimizer state repeated there.
* Megatron-FSDP v2 lays parameters out in one flat buffer whose shards are multiples of the least
  common multiple of all row sizes; only its padding is modelled, at the best that this rule allows.

An optimizer that needs whole matrices gets them by ``full_tensor()``: every rank gathers, and works
on, all of them.

With MXFP8, FSDP2 is taken to compute as fast as we do and to gather bf16: its weights are
quantized after each gather, at a price that is left out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sshsdp.estimate.costs import ModelCost, UnitCost, space_cost
from sshsdp.layout.unit_plan import group_by_space

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sshsdp.layout.unit_plan import ParameterSpec
    from sshsdp.policies import RuntimePolicy, UpdatePolicy

__all__ = ["dim0_padded_numel", "fsdp2_cost", "hsdp_cost", "lcm_padded_numel"]

Shape = tuple[int, ...]


def dim0_padded_numel(shape: Shape, num_shards: int) -> int:
    """Elements of a gathered parameter whose first dim is cut into equal chunks of whole rows."""
    if not shape:
        return num_shards
    return -(-shape[0] // num_shards) * num_shards * math.prod(shape[1:])


def lcm_padded_numel(shapes: Sequence[Shape], num_shards: int, *, num_rows: int = 1) -> int:
    """Elements of a unit whose shards are multiples of the LCM of all groups of ``num_rows`` rows.

    The regions are taken to follow one another without gaps, which the rule does not always reach.
    """
    chunk = math.lcm(*(num_rows * math.prod(shape[1:]) for shape in shapes))
    numel = sum(math.prod(shape) for shape in shapes)
    multiple = chunk * num_shards
    return -(-numel // multiple) * multiple


def fsdp2_cost(
    specs: dict[str, list[ParameterSpec]],
    *,
    num_ranks: int,
    runtime: RuntimePolicy,
    update: UpdatePolicy,
) -> ModelCost:
    """FSDP2 over a 1-D mesh of all ranks."""
    return _cost("FSDP2", specs, 1, num_ranks, runtime, update)


def hsdp_cost(
    specs: dict[str, list[ParameterSpec]],
    *,
    num_replicas: int,
    num_shards: int,
    runtime: RuntimePolicy,
    update: UpdatePolicy,
) -> ModelCost:
    """FSDP2 over the 2-D mesh."""
    return _cost("HSDP", specs, num_replicas, num_shards, runtime, update)


def _cost(
    scheme: str,
    specs: dict[str, list[ParameterSpec]],
    num_replicas: int,
    num_shards: int,
    runtime: RuntimePolicy,
    update: UpdatePolicy,
) -> ModelCost:
    units = []
    for index, (name, members) in enumerate(specs.items()):
        spaces = [
            space_cost(
                [spec.shape for spec in group],
                sum(dim0_padded_numel(spec.shape, num_shards) for spec in group),
                trainable=group[0].is_trainable,
                dtype=group[0].runtime_dtype,
                update=update,
                needs_whole=group[0].is_owned,
            )
            for group in group_by_space(members)
        ]
        units.append(UnitCost(name=name, is_root=index == 0, spaces=tuple(spaces)))
    return ModelCost(
        scheme=scheme,
        units=tuple(units),
        num_replicas=num_replicas,
        num_shards=num_shards,
        num_update_slices=1,
        reshard_after_forward=runtime.reshard_after_forward,
        prefetch=1,
        keeps_last_unit=False,
        has_runtime_shards=False,
        has_owners=False,
        agrees_on_unused=False,
        copies_in_and_out=True,
        is_offloaded=update.device == "cpu",
    )
