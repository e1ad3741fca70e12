"""MXFP8 products by dequantizing: for CPUs, Ampere and Hopper, and the reference for the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from sshsdp.formats.mxfp8_gemm import GemmBackend, put

if TYPE_CHECKING:
    from sshsdp.formats.mxfp8_blocks import BlockScaled, ScaleRounding

__all__ = ["Emulation"]


class Emulation(GemmBackend):
    """Dequantize, then an ordinary product: right on any device.

    Elements times scales are exact in bfloat16 and float32, so that a product differs from one on
    tensor cores only in the order of its sums. On CPUs products run in float32 whatever the dtype
    of the result, which is rounded once: their bfloat16 products are slower and no more exact.
    """

    name = "emulation"

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
            return functional.grouped_mm(left.dequantize(operands), weight, offs=ends).to(dtype)

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
        dtype = _grouped_dtype(left)
        with _no_autocast(left):
            operands = left.dequantize(dtype), right.dequantize(dtype).mT
            product = functional.grouped_mm(*operands, offs=ends)
            put(target, product, accumulate=accumulate)


def _operand_dtype(dtype: torch.dtype, operand: BlockScaled) -> torch.dtype:
    return torch.float32 if operand.data.is_cpu else dtype


def _grouped_dtype(operand: BlockScaled) -> torch.dtype:
    # The grouped kernels of accelerators take bfloat16 only.
    return torch.float32 if operand.data.is_cpu else torch.bfloat16


def _no_autocast(operand: BlockScaled) -> torch.autocast:
    # The operands are what the format says, not what autocast would make of them.
    return torch.autocast(operand.data.device.type, enabled=False)
