"""Products of block-scaled matrices: one small interface, and who implements it where.

Every product of a linear layer is ``left @ right.mT`` of two matrices whose blocks run along their
last dim, which is the one that is summed over::

    forward          inputs  [tokens, in]   weight    [out, in]     -> [tokens, out]
    input gradient   grad    [tokens, out]  weight.mT [in, out]     -> [tokens, in]
    weight gradient  grad.mT [out, tokens]  inputs.mT [in, tokens]  -> [out, in]

A ``.mT`` is a view of a matrix that was quantized columnwise, so nothing is transposed in memory.

Packed experts do the same with one matrix per expert; ``ends`` holds where each expert's tokens
end.

Example:
    >>> backend = choose_backend("auto", torch.device("cpu"), "rceil")
    >>> inputs, _ = backend.quantize(torch.randn(64, 32), "rceil", rowwise=True, columnwise=False)
    >>> weight = quantize(torch.randn(96, 32), dim=-1)
    >>> backend.product(inputs, weight, torch.float32).shape
    torch.Size([64, 96])
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch

from sshsdp.formats.mxfp8_blocks import BLOCK, quantize

if TYPE_CHECKING:
    from sshsdp.formats.mxfp8_blocks import BlockScaled, ScaleRounding

__all__ = ["GemmBackend", "put"]


class GemmBackend(ABC):
    """Quantizes activations and multiplies block-scaled matrices.

    Attributes:
        name: As in ``MXFP8Format(backend=...)``.
        reads_swizzled: Scales are best given in tiles of 128 x 4 (see `mxfp8_scales`).
        group_rows: What the number of an expert's tokens is padded to.
        dtypes: What products may be in.
    """

    name: ClassVar[str]
    reads_swizzled: ClassVar[bool] = False
    group_rows: ClassVar[int] = BLOCK
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float32)

    @staticmethod
    @abstractmethod
    def why_not(device: torch.device, rounding: ScaleRounding) -> str | None:
        """Why this backend cannot run here, or None."""

    def quantize(
        self, values: torch.Tensor, rounding: ScaleRounding, *, rowwise: bool, columnwise: bool
    ) -> tuple[BlockScaled | None, BlockScaled | None]:
        """Quantize activations or gradients, ``[tokens, features]``, in the orientations asked for.

        Both dims are multiples of 32.
        """
        return (
            quantize(values, -1, rounding) if rowwise else None,
            quantize(values, -2, rounding) if columnwise else None,
        )

    @abstractmethod
    def product(self, left: BlockScaled, right: BlockScaled, dtype: torch.dtype) -> torch.Tensor:
        """``left @ right.mT``, rounded once to ``dtype``."""

    @abstractmethod
    def write_product(
        self, target: torch.Tensor, left: BlockScaled, right: BlockScaled, *, accumulate: bool
    ) -> None:
        """``left @ right.mT`` into (or, with ``accumulate``, onto) ``target``, in its dtype."""

    @abstractmethod
    def grouped_product(
        self, left: BlockScaled, right: BlockScaled, ends: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Each group's rows of ``left`` times that group's matrix of ``right`` (3-D)."""

    @abstractmethod
    def write_grouped_product(
        self,
        target: torch.Tensor,
        left: BlockScaled,
        right: BlockScaled,
        ends: torch.Tensor,
        *,
        accumulate: bool,
    ) -> None:
        """Each group's columns of ``left`` times those of ``right``, into ``target`` (3-D)."""


def put(target: torch.Tensor, values: torch.Tensor, *, accumulate: bool) -> None:
    """Copy ``values`` into ``target`` or add them to it, whatever the two dtypes."""
    if accumulate:
        target.add_(values)
    else:
        target.copy_(values)
