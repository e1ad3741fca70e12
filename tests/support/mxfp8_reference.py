"""A slow, obvious MXFP8 linear layer, written with torchao's quantizer and dense products."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

from tests.support.subject import widened

__all__ = ["ReferenceLinear", "blocks", "reference_linear", "rounded", "run_by_reference"]


def blocks(
    values: torch.Tensor, dim: int, mode: str = "rceil"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements and scales as bytes, the blocks' dim in its place."""
    along = values.float().movedim(dim, -1).contiguous()
    scales, data = to_mx(along, torch.float8_e4m3fn, 32, ScaleCalculationMode(mode))
    elements, exponents = (part.view(torch.uint8).movedim(-1, dim) for part in (data, scales))
    return elements, exponents


def rounded(values: torch.Tensor, dim: int, mode: str = "rceil") -> torch.Tensor:
    """Values after MXFP8 rounding in zero-padded blocks along ``dim``, in float32 or float64."""
    along = values.movedim(dim, -1)
    size = along.shape[-1]
    padded = torch.nn.functional.pad(along.float(), (0, -size % 32)).contiguous()
    scales, data = to_mx(padded, torch.float8_e4m3fn, 32, ScaleCalculationMode(mode))
    result = to_dtype(data, scales, torch.float8_e4m3fn, 32, torch.float32)
    return widened(result.to(values.dtype))[..., :size].movedim(-1, dim)


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


def reference_linear(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``functional.linear`` in MXFP8 by torchao."""
    output = _Function.apply(inputs, weight, "rceil")
    return output if bias is None else output + bias


def run_by_reference(model: nn.Module) -> nn.Module:
    """Run what is in MXFP8 by default by the reference: linear layers of repeated blocks, experts.

    Modules that multiply otherwise have an attribute ``linear``, which is exchanged.
    """
    for blocks in [m for m in model.modules() if isinstance(m, nn.ModuleList)]:
        for module in blocks.modules():
            if hasattr(module, "linear") and not isinstance(module.linear, nn.Module):
                module.linear = reference_linear
            is_plain = type(module) is nn.Linear
            if is_plain and not any(size % 32 for size in module.weight.shape):
                module.forward = functools.partial(_forward, module)
    return model


def _forward(module: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    return reference_linear(inputs, module.weight, module.bias)


class ReferenceLinear(nn.Module):
    """``nn.Linear`` over the same parameters, in MXFP8 by torchao."""

    def __init__(self, linear: nn.Linear, mode: str = "rceil") -> None:
        super().__init__()
        self.weight, self.bias, self.mode = linear.weight, linear.bias, mode

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = _Function.apply(inputs, self.weight, self.mode)
        return output if self.bias is None else output + self.bias
