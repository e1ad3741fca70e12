"""From the parameters of a unit to its address spaces, as the engine builds and reports them.

Parameters share an address space if they are trained or frozen alike, have one runtime dtype, and
are updated alike: on flat shards, or as whole matrices by owners. Weights come first in it: biases
and norms usually form the param group without weight decay.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from sshsdp.layout.cuts import Cuts, elements
from sshsdp.layout.layout import UnitLayout
from sshsdp.layout.planner import RegionRequest, plan_address_space

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["ParameterSpec", "alignment_of", "group_by_space", "plan_unit", "requests_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """A parameter as the planner sees it.

    Attributes:
        name: Fully qualified name.
        shape: Logical shape.
        runtime_dtype: Dtype of its runtime elements.
        is_trainable: Whether it has an update parameter.
        cuts: Where shards may cut it: what its runtime format and its optimizer ask for.
        pack: Label of the pack that it belongs to.
        is_owned: Whether it is updated as whole matrices, by owners.
    """

    name: str
    shape: tuple[int, ...]
    runtime_dtype: torch.dtype
    is_trainable: bool
    cuts: Cuts = field(default_factory=elements)
    pack: str | None = None
    is_owned: bool = False


def alignment_of(dtype: torch.dtype) -> int:
    """Elements at whose multiples regions and shards start: kernels load 16 bytes at a time.

    In MXFP8 (``float8_e4m3fn`` elements) the scales must be aligned too, one byte for 32 elements.
    """
    return 16 * 32 if dtype == torch.float8_e4m3fn else max(16 // dtype.itemsize, 1)


def group_by_space(parameters: Iterable[ParameterSpec]) -> list[list[ParameterSpec]]:
    """The parameters of each address space; whole matrices follow those that they were among."""
    groups: dict[tuple[bool, torch.dtype], dict[bool, list[ParameterSpec]]] = {}
    for parameter in parameters:
        key = parameter.is_trainable, parameter.runtime_dtype
        groups.setdefault(key, {False: [], True: []})[parameter.is_owned].append(parameter)
    return [members for alike in groups.values() for members in alike.values() if members]


def requests_of(parameters: Iterable[ParameterSpec]) -> list[RegionRequest]:
    """What to ask the planner for."""
    return [
        RegionRequest(
            name=parameter.name,
            shape=parameter.shape,
            order=len(parameter.shape) < 2,
            cut_unit=parameter.cuts.unit,
            transposed_cut_unit=parameter.cuts.transposed_unit,
            pack=parameter.pack,
        )
        for parameter in parameters
    ]


def plan_unit(
    name: str, parameters: Sequence[ParameterSpec], *, num_shards: int, num_update_slices: int
) -> UnitLayout:
    """Plan all address spaces of a unit.

    Args:
        name: FQN of the unit's module.
        parameters: In ``named_parameters`` order, tied ones once.
        num_shards: Size of the ``shard`` mesh dimension.
        num_update_slices: Into how many update shards each shard is cut again.
    """
    groups = group_by_space(parameters)
    return UnitLayout(
        name=name,
        spaces=tuple(
            plan_address_space(
                requests_of(members),
                num_shards=num_shards,
                num_update_slices=1 if members[0].is_owned else num_update_slices,
                alignment=alignment_of(members[0].runtime_dtype),
            )
            for members in groups
        ),
        runtime_dtypes=tuple(members[0].runtime_dtype for members in groups),
        trainable=tuple(members[0].is_trainable for members in groups),
        owned=tuple(members[0].is_owned for members in groups),
    )
