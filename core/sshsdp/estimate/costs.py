"""A layout reduced to what memory and traffic depend on: sizes, formats and who keeps what.

The same description serves the peers (FSDP2, classic HSDP), whose padding follows other rules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sshsdp.layout.layout import Layout
    from sshsdp.policies import RuntimePolicy, UpdatePolicy

__all__ = ["FormatCost", "ModelCost", "SpaceCost", "UnitCost", "model_cost"]


@dataclass(frozen=True, slots=True)
class FormatCost:
    """Bytes of a runtime format.

    Attributes:
        name: For tables.
        block: Elements that share one scale; 1 without scales.
        block_nbytes: Bytes of a block, its scale included.
        num_orientations: Copies that are kept: two if forward and backward read different bytes.
    """

    name: str
    block: int
    block_nbytes: int
    num_orientations: int = 1

    @classmethod
    def of(cls, dtype: torch.dtype) -> FormatCost:
        """The format whose elements have this dtype: MXFP8 for ``float8_e4m3fn``, else dense."""
        if dtype == torch.float8_e4m3fn:
            # 32 elements and one scale, along rows for forward and along columns for backward.
            return cls("mxfp8", 32, 33, 2)
        return cls(str(dtype).removeprefix("torch."), 1, dtype.itemsize)

    def gathered_nbytes(self, numel: int) -> int:
        """Bytes that one gather brings together."""
        return numel // self.block * self.block_nbytes

    def stored_nbytes(self, numel: int) -> int:
        """Bytes of a shard of ``numel`` elements."""
        return self.gathered_nbytes(numel) * self.num_orientations


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceCost:
    """One address space.

    Attributes:
        numel: Elements, padding included.
        shapes: Shapes of its parameters.
        trainable: Whether it has update parameters.
        format: Its runtime format.
        update_itemsize: Bytes of a master element.
        reduce_itemsize: Bytes of a gradient element while it is summed.
        is_shared: Update and runtime parameters are the same memory.
        needs_whole: Its optimizer sees whole matrices.
    """

    numel: int
    shapes: tuple[tuple[int, ...], ...]
    trainable: bool
    format: FormatCost
    update_itemsize: int
    reduce_itemsize: int
    is_shared: bool
    needs_whole: bool = False

    @property
    def returned_itemsize(self) -> int:
        """Bytes of an element that an owner sends back; what has scales is encoded on arrival."""
        return self.format.block_nbytes if self.format.block == 1 else self.update_itemsize

    @property
    def num_parameter_elements(self) -> int:
        """Elements without padding."""
        return sum(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCost:
    """The spaces of one unit.

    Attributes:
        name: FQN of its module.
        is_root: Whether it stays gathered from its forward through backward.
        spaces: Its address spaces.
    """

    name: str
    is_root: bool
    spaces: tuple[SpaceCost, ...]

    @property
    def is_trainable(self) -> bool:
        """Whether any of its parameters is trained."""
        return any(space.trainable for space in self.spaces)

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of the gathered unit."""
        return sum(space.format.gathered_nbytes(space.numel) for space in self.spaces)

    @property
    def parameter_nbytes(self) -> int:
        """The same without padding."""
        return sum(s.format.gathered_nbytes(s.num_parameter_elements) for s in self.spaces)

    @property
    def gradient_nbytes(self) -> int:
        """Bytes of its unsharded gradients."""
        return sum(s.numel * s.reduce_itemsize for s in self.spaces if s.trainable)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """All units and how a scheme treats them.

    Attributes:
        scheme: ``"SS-HSDP"`` or a peer's name.
        units: The root first, then in the order of forward.
        num_replicas: R.
        num_shards: S.
        num_update_slices: Into how many update shards a runtime shard is cut.
        reshard_after_forward: Whether units are gathered again in backward.
        prefetch: Units gathered ahead.
        keeps_last_unit: The last unit of forward stays gathered for backward.
        has_runtime_shards: Runtime shards are kept beside the masters; else every gather casts.
        has_owners: Where an optimizer sees whole matrices, each is on one rank; else every rank
            gathers them all.
        agrees_on_unused: One small all-reduce per step tells which parameters no rank used.
        copies_in_and_out: Gathers and reductions go through buffers of their own.
        is_offloaded: Masters, reduced gradients and optimizer state are on the host.
    """

    scheme: str
    units: tuple[UnitCost, ...]
    num_replicas: int
    num_shards: int
    num_update_slices: int
    reshard_after_forward: bool
    prefetch: int
    keeps_last_unit: bool = True
    has_runtime_shards: bool = True
    has_owners: bool = True
    agrees_on_unused: bool = True
    copies_in_and_out: bool = False
    is_offloaded: bool = False

    @property
    def num_ranks(self) -> int:
        """Ranks of the mesh."""
        return self.num_replicas * self.num_shards

    @property
    def spaces(self) -> list[SpaceCost]:
        """The spaces of all units."""
        return [space for unit in self.units for space in unit.spaces]

    @property
    def num_parameter_elements(self) -> int:
        """Elements of the model, padding left out."""
        return sum(space.num_parameter_elements for space in self.spaces)

    @property
    def padding(self) -> int:
        """Elements that belong to no parameter."""
        return sum(space.numel - space.num_parameter_elements for space in self.spaces)

    @property
    def inner_units(self) -> list[UnitCost]:
        """All but the root."""
        return [unit for unit in self.units if not unit.is_root]

    def is_regathered(self, unit: UnitCost, space: SpaceCost) -> bool:
        """Whether backward gathers a space of a unit anew.

        A frozen unit is reached by backward only if something in front of it is trained. Trained
        parameters of the root are taken to be in front (embeddings).
        """
        is_reached = any(u.is_trainable for u in self.units[: self.units.index(unit) + 1])
        if space.format.num_orientations > 1:
            return is_reached
        is_kept = self.keeps_last_unit and unit == self.units[-1]
        return is_reached and self.reshard_after_forward and not unit.is_root and not is_kept


def model_cost(layout: Layout, runtime: RuntimePolicy, update: UpdatePolicy) -> ModelCost:
    """Describe an engine's layout, or the one that it would have."""
    return ModelCost(
        scheme="SS-HSDP",
        units=tuple(
            UnitCost(
                name=unit.name,
                is_root=index == 0,
                spaces=tuple(
                    space_cost(
                        [region.shape for region in space.regions],
                        space.numel,
                        trainable=trainable,
                        dtype=dtype,
                        update=update,
                        needs_whole=owned,
                    )
                    for space, dtype, trainable, owned in zip(
                        unit.spaces, unit.runtime_dtypes, unit.trainable, unit.owned, strict=True
                    )
                ),
            )
            for index, unit in enumerate(layout.units)
        ),
        num_replicas=layout.num_replicas,
        num_shards=layout.num_shards,
        num_update_slices=layout.num_replicas if update.sharding == "hierarchical" else 1,
        reshard_after_forward=runtime.reshard_after_forward,
        prefetch=runtime.prefetch,
        is_offloaded=update.device == "cpu",
    )


def space_cost(
    shapes: Sequence[tuple[int, ...]],
    numel: int,
    *,
    trainable: bool,
    dtype: torch.dtype,
    update: UpdatePolicy,
    needs_whole: bool = False,
) -> SpaceCost:
    """One space under an update policy."""
    update_dtype = update.dtype or dtype
    return SpaceCost(
        numel=numel,
        shapes=tuple(shapes),
        trainable=trainable,
        format=FormatCost.of(dtype),
        update_itemsize=update_dtype.itemsize,
        reduce_itemsize=(update.reduce_dtype or update_dtype).itemsize,
        is_shared=update_dtype == dtype and update.device is None and not needs_whole,
        needs_whole=needs_whole,
    )
