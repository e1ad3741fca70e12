"""A slow, obvious MXFP8 linear layer, written with torchao's quantizer and dense products."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

__all__ = ["ReferenceLinear", "rounded"]


def rounded(values: torch.Tensor, dim: int, mode: str = "rceil") -> torch.Tensor:
    """Values after MXFP8 rounding in zero-padded blocks along ``dim``, in float32."""
    along = values.float().movedim(dim, -1)
    size = along.shape[-1]
    padded = torch.nn.functional.pad(along, (0, -size % 32)).contiguous()
    scales, data = to_mx(padded, torch.float8_e4m3fn, 32, ScaleCalculationMode(mode))
    result = to_dtype(data, scales, torch.float8_e4m3fn, 32, torch.float32)
    return result[..., :size].movedim(-1, dim)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Any, weight: Any, mode: str) -> Any:
        tokens = inputs.reshape(-1, inputs.shape[-1])
        ctx.save_for_backward(tokens, weight)
        ctx.mode, ctx.shape = mode, inputs.shape
        output = rounded(tokens, -1, mode) @ rounded(weight, -1, mode).T
        return output.to(inputs.dtype).view(*inputs.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        tokens, weight = ctx.saved_tensors
        mode = ctx.mode
        flat = grad.reshape(-1, grad.shape[-1])
        grad_inputs = rounded(flat, -1, mode) @ rounded(weight, 0, mode)
        grad_weight = rounded(flat, 0, mode).T @ rounded(tokens, 0, mode)
        return grad_inputs.to(grad.dtype).view(ctx.shape), grad_weight.to(weight.dtype), None


class ReferenceLinear(nn.Module):
    """``nn.Linear`` over the same parameters, in MXFP8 by torchao."""

    def __init__(self, linear: nn.Linear, mode: str = "rceil") -> None:
        super().__init__()
        self.weight, self.bias, self.mode = linear.weight, linear.bias, mode

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = _Function.apply(inputs, self.weight, self.mode)
        return output if self.bias is None else output + self.bias
