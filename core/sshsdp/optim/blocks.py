"""Low-bit optimizers, which quantize their state in blocks of consecutive elements.

torchao's Adam family keeps moments in 8 or 4 bits or in fp8, with one scale for every
``block_size`` elements, and leaves parameters of fewer than 4,096 elements, or whose size no block
divides, in the parameter's dtype. Both are decided here by the whole parameter: regions and shards
start at multiples of the block, so that every block is where it would be without sharding, and a
small piece of a large parameter is quantized like the rest of it.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["block_size_for", "block_size_of", "decide_by_parameter", "dense", "quantize_again"]

# As in torchao.optim.adam._AdamBase._new_buffer, which follows bitsandbytes.
_LEAST_NUMEL = 4096


def block_size_of(optimizer: torch.optim.Optimizer) -> int | None:
    """Elements that share a scale of the optimizer's state; None if it is not quantized."""
    module = sys.modules.get("torchao.optim.adam")
    if module is None or not isinstance(optimizer, module._AdamBase):
        return None
    size = optimizer.block_size
    return None if math.isinf(size) else int(size)


def block_size_for(optimizer: torch.optim.Optimizer, shape: tuple[int, ...]) -> int:
    """Elements that share a scale of one parameter's state; 1 if it is not quantized."""
    size, numel = block_size_of(optimizer), math.prod(shape)
    return size if size is not None and numel >= _LEAST_NUMEL and numel % size == 0 else 1


def decide_by_parameter(
    optimizer: torch.optim.Optimizer, is_quantized: Callable[[torch.Tensor], bool]
) -> None:
    """Have the optimizer quantize the state of the update tensors that ``is_quantized`` names."""
    if block_size_of(optimizer) is None:
        return
    source: Any = optimizer

    def new_buffer(tensor: torch.Tensor, signed: bool) -> torch.Tensor:
        if tensor.numel() == 0 or not is_quantized(tensor):
            return torch.zeros_like(tensor, requires_grad=False)
        made: torch.Tensor = source._subclass_zeros(tensor, signed, source.block_size)
        return made

    source._new_buffer = new_buffer


def dense(value: Any) -> Any:
    """A state entry in the parameter's dtype, if it is quantized; else itself."""
    return value.dequantize() if hasattr(value, "dequantize") and hasattr(value, "codes") else value


def quantize_again(optimizer: torch.optim.Optimizer) -> None:
    """Quantize state that was loaded dense, as the optimizer keeps it.

    What was quantized before gets the same codes, and the same scales to a rounding.
    """
    if block_size_of(optimizer) is None:
        return
    source: Any = optimizer
    for tensor, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == tensor.shape and tensor.dim():
                # Of torchao's moments, the first one alone has a sign.
                kept = source._new_buffer(tensor, key == "exp_avg")
                state[key] = kept.copy_(_with_old_scales(value, kept))


def _with_old_scales(values: torch.Tensor, kept: Any) -> torch.Tensor:
    """``values`` (1-D) such that their largest magnitude in each block is the block's old scale.

    Codes reach from -0.99 (8 bits) or so to 1. Where the largest value of a block was negative, it
    was rounded towards zero, and a scale taken from it would be too small.
    """
    lowest = -kept.qmap.min().item() if hasattr(kept, "qmap") else 1.0
    if not 0.0 < lowest < 1.0:
        return values
    blocks = values.view(-1, kept.block_size)
    least = blocks.min(dim=1, keepdim=True).values
    was_rounded = (blocks == least) & (-least >= blocks.max(dim=1, keepdim=True).values)
    return torch.where(was_rounded, blocks / lowest, blocks).view(-1)
