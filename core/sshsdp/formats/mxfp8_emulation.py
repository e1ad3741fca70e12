"""MXFP8 products by dequantizing: for CPUs, Ampere and Hopper, and the reference for the rest."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from sshsdp.formats.mxfp8_gemm import GemmBackend, put

if TYPE_CHECKING:
    from sshsdp.formats.mxfp8_blocks import BlockScaled, ScaleRounding

__all__ = ["Emulation"]


class Emulation(GemmBackend):
    """Dequantize, then an ordinary product: right on any device.

    Elements times scales are exact in bfloat16 and wider, so that a product differs from one on
    tensor cores only in the order of its sums. On CPUs products run in float32 where the result is
    narrower, which is rounded once: their bfloat16 products are slower and no more exact.
    """

    name = "emulation"
    dtypes = (torch.bfloat16, torch.float32, torch.float64)

    @staticmethod
    def why_not(device: torch.device, rounding: ScaleRounding) -> str | None:
        """Runs everywhere."""
        return None

    def product(self, left: BlockScaled, right: BlockScaled, dtype: torch.dtype) -> torch.Tensor:
        """See `GemmBackend.product`."""
        operands = _operand_dtype(dtype, left)
        with _no_autocast(left):
            return left.dequantize(operands).mm(right.dequantize(operands).mT).to(dtype)

    def write_product(
        self, target: torch.Tensor, left: BlockScaled, right: BlockScaled, *, accumulate: bool
    ) -> None:
        """See `GemmBackend.write_product`."""
        dtype = _operand_dtype(target.dtype, left)
        with _no_autocast(left):
            operands = left.dequantize(dtype), right.dequantize(dtype).mT
            if dtype == target.dtype:
                if accumulate:
                    target.addmm_(*operands)
                else:
                    torch.mm(*operands, out=target)
            else:
                put(target, operands[0].mm(operands[1]), accumulate=accumulate)

    def grouped_product(
        self, left: BlockScaled, right: BlockScaled, ends: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """See `GemmBackend.grouped_product`."""
        operands = _operand_dtype(dtype, left)
        with _no_autocast(left):
            weight = right.dequantize(operands).mT
            return _grouped_mm(left.dequantize(operands), weight, ends).to(dtype)

    def write_grouped_product(
        self,
        target: torch.Tensor,
        left: BlockScaled,
        right: BlockScaled,
        ends: torch.Tensor,
        *,
        accumulate: bool,
    ) -> None:
        """See `GemmBackend.write_grouped_product`."""
        dtype = _grouped_dtype(target.dtype, left)
        with _no_autocast(left):
            operands = left.dequantize(dtype), right.dequantize(dtype).mT
            put(target, _grouped_mm(*operands, ends), accumulate=accumulate)


def _operand_dtype(dtype: torch.dtype, operand: BlockScaled) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if operand.data.is_cpu else dtype


def _grouped_dtype(dtype: torch.dtype, operand: BlockScaled) -> torch.dtype:
    # The grouped kernels of accelerators take bfloat16 only.
    return _operand_dtype(dtype, operand) if operand.data.is_cpu else torch.bfloat16


def _grouped_mm(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    if left.dtype != torch.float64:
        return functional.grouped_mm(left, right, offs=ends)
    # Torch has no such kernel for float64; looking at `ends` makes a host wait.
    bounds = [0, *ends.tolist()]
    if right.ndim == 3:
        result = left.new_zeros(len(left), right.shape[-1])
        for index, (start, stop) in enumerate(pairwise(bounds)):
            torch.mm(left[start:stop], right[index], out=result[start:stop])
        return result
    groups = [left[:, start:stop] @ right[start:stop] for start, stop in pairwise(bounds)]
    return torch.stack(groups)


def _no_autocast(operand: BlockScaled) -> torch.autocast:
    # The operands are what the format says, not what autocast would make of them.
    return torch.autocast(operand.data.device.type, enabled=False)
