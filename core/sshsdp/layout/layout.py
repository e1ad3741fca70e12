"""The layout of a whole model: its units' address spaces, printable and comparable."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sshsdp.layout.address_space import AddressSpace

__all__ = ["Layout", "UnitLayout"]

_MXFP8 = torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True)
class UnitLayout:
    """Address spaces of one unit.

    Attributes:
        name: FQN of the unit's module.
        spaces: Its address spaces.
        runtime_dtypes: Dtype of each space's runtime elements; ``float8_e4m3fn`` stands for MXFP8.
        trainable: Whether each space has update parameters.
        owned: Whether they are whole matrices on owners, not slices of the runtime shards.
    """

    name: str
    spaces: tuple[AddressSpace, ...]
    runtime_dtypes: tuple[torch.dtype, ...]
    trainable: tuple[bool, ...]
    owned: tuple[bool, ...]

    @property
    def runtime_nbytes(self) -> int:
        """Bytes of the gathered unit; in MXFP8, of what one direction reads, scales included."""
        return sum(
            space.numel * dtype.itemsize + (space.numel // 32 if dtype == _MXFP8 else 0)
            for space, dtype in zip(self.spaces, self.runtime_dtypes, strict=True)
        )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All units over an R x S mesh.

    Attributes:
        units: The root first, then in registration order.
        num_shards: S.
        num_replicas: R.
    """

    units: tuple[UnitLayout, ...]
    num_shards: int
    num_replicas: int

    @property
    def numel(self) -> int:
        """Elements of all address spaces, padding included."""
        return sum(space.numel for unit in self.units for space in unit.spaces)

    @property
    def padding(self) -> int:
        """Elements that belong to no parameter."""
        return sum(space.padding for unit in self.units for space in unit.spaces)

    def digest(self) -> str:
        """Equal for equal layouts, on every rank and in every process."""
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def __str__(self) -> str:
        """A table: unit, parameters, elements, padding, runtime bytes."""
        lines = [
            f"layout: {len(self.units)} units over {self.num_replicas} x {self.num_shards} ranks, "
            f"{self.numel - self.padding:,} elements, padding "
            f"{self.padding / max(self.numel, 1):.3%}"
        ]
        for unit in self.units:
            for space, dtype, trainable, owned in zip(
                unit.spaces, unit.runtime_dtypes, unit.trainable, unit.owned, strict=True
            ):
                kind = "owned" if owned else "trainable" if trainable else "frozen"
                lines.append(
                    f"  {unit.name}: {len(space.regions)} {kind} parameters, {space.numel:,} x "
                    f"{str(dtype).removeprefix('torch.')}, padding {space.padding:,}"
                )
        return "\n".join(lines)
