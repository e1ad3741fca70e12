"""Linear layers and packed experts whose three products run in MXFP8.

::

    forward    inputs --rowwise--> x        x @ weight(rowwise).mT        -> output
               inputs --columnwise--> kept for backward (1.03 bytes per element)
    backward   grad --rowwise--> d          d @ weight(columnwise)        -> input gradient
               grad --columnwise--> d'      d'.mT @ inputs(columnwise)    -> weight gradient

The weight itself is only asked for its blocks when a product needs them, so that forward and
backward may each gather one orientation. Its gradient goes where its *sink* says (the
reduce-scatter input), in the sink's dtype; without a sink it is an ordinary gradient of the leaf.

Numbers of tokens that are no multiple of 32 are padded with zeros, which change no product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from sshsdp.formats.mxfp8_blocks import BLOCK, BlockScaled

if TYPE_CHECKING:
    from collections.abc import Callable

    from sshsdp.formats.mxfp8_blocks import ScaleRounding
    from sshsdp.formats.mxfp8_gemm import GemmBackend

__all__ = ["GradientSink", "MXFP8Operand", "MXFP8Weight", "mxfp8_grouped_linear", "mxfp8_linear"]


class MXFP8Weight(Protocol):
    """Where a weight's blocks come from: ``[out, in]``, or ``[experts, out, in]``."""

    def rowwise(self) -> BlockScaled:
        """Blocks along the input features, for forward."""

    def columnwise(self) -> BlockScaled:
        """Blocks along the output features, for the input gradient."""


class GradientSink(Protocol):
    """Where a gradient goes instead of into ``.grad`` (a slot of the engine)."""

    def is_gradient_wanted(self) -> bool:
        """Whether the running backward accumulates the gradient."""

    def gradient_target(self) -> tuple[torch.Tensor, bool]:
        """The tensor to write, and whether to add to what it holds."""


@dataclass(frozen=True, kw_only=True)
class MXFP8Operand:
    """A weight and how it is multiplied.

    Attributes:
        weight: Its blocks.
        backend: Who multiplies.
        rounding: How activations and gradients are quantized.
        sink: Where the weight's gradient goes; None: an ordinary gradient of the leaf.
        bias_sink: The same for the bias.
    """

    weight: MXFP8Weight
    backend: GemmBackend
    rounding: ScaleRounding = "rceil"
    sink: GradientSink | None = None
    bias_sink: GradientSink | None = None


def mxfp8_linear(
    inputs: torch.Tensor,
    leaf: torch.Tensor,
    bias: torch.Tensor | None,
    operand: MXFP8Operand,
) -> torch.Tensor:
    """``functional.linear`` in MXFP8.

    Args:
        inputs: ``[..., in]``, any floating dtype.
        leaf: Stands for the weight in the autograd graph: its shape and ``requires_grad`` count,
            its values are never read.
        bias: ``[out]``.
        operand: The weight.

    Returns:
        ``[..., out]``, in autocast's dtype where autocast is on, else in the dtype of ``inputs``.
    """
    keeps_inputs = torch.is_grad_enabled() and leaf.requires_grad
    apply: Callable[..., torch.Tensor] = _Linear.apply
    return apply(inputs, leaf, bias, operand, _output_dtype(inputs), keeps_inputs)


def mxfp8_grouped_linear(
    inputs: torch.Tensor, leaf: torch.Tensor, ends: torch.Tensor, operand: MXFP8Operand
) -> torch.Tensor:
    """One linear layer per expert over tokens sorted by expert, in MXFP8.

    Args:
        inputs: ``[tokens, in]``.
        leaf: Stands for the weight, ``[experts, out, in]``, as in `mxfp8_linear`.
        ends: Where each expert's tokens end, ascending, the last one at the number of tokens; on
            the device of ``inputs``. Experts may have no tokens.
        operand: The weight.

    Returns:
        ``[tokens, out]``.
    """
    keeps_inputs = torch.is_grad_enabled() and leaf.requires_grad
    apply: Callable[..., torch.Tensor] = _GroupedLinear.apply
    return apply(inputs, leaf, ends, operand, _output_dtype(inputs), keeps_inputs)


def _output_dtype(inputs: torch.Tensor) -> torch.dtype:
    kind = inputs.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else inputs.dtype


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        leaf: torch.Tensor,
        bias: torch.Tensor | None,
        operand: MXFP8Operand,
        dtype: torch.dtype,
        keeps_inputs: bool,
    ) -> torch.Tensor:
        tokens = _padded(inputs)
        rowwise, columnwise = operand.backend.quantize(
            tokens, operand.rounding, rowwise=True, columnwise=keeps_inputs
        )
        assert rowwise is not None
        _save(ctx, columnwise)
        ctx.operand, ctx.inputs_dtype, ctx.inputs_shape = operand, inputs.dtype, inputs.shape
        output = operand.backend.product(rowwise, operand.weight.rowwise(), dtype)
        output = _unpadded(output, inputs.shape)
        return output if bias is None else output.add_(bias.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        operand: MXFP8Operand = ctx.operand
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        needs_weight = needs_weight and _is_wanted(operand.sink)
        rowwise, columnwise = operand.backend.quantize(
            _padded(grad), operand.rounding, rowwise=needs_input, columnwise=needs_weight
        )
        grad_inputs = grad_weight = grad_bias = None
        if rowwise is not None:
            weight = operand.weight.columnwise().mT
            grad_inputs = operand.backend.product(rowwise, weight, ctx.inputs_dtype)
            grad_inputs = _unpadded(grad_inputs, ctx.inputs_shape)
        if columnwise is not None:
            left, right = columnwise.mT, _saved(ctx).mT
            if operand.sink is None:
                grad_weight = operand.backend.product(left, right, _gradient_dtype(grad))
            else:
                target, accumulate = operand.sink.gradient_target()
                operand.backend.write_product(target, left, right, accumulate=accumulate)
        if needs_bias and _is_wanted(operand.bias_sink):
            grad_bias = _bias_gradient(grad, operand.bias_sink)
        return grad_inputs, grad_weight, grad_bias, None, None, None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        leaf: torch.Tensor,
        ends: torch.Tensor,
        operand: MXFP8Operand,
        dtype: torch.dtype,
        keeps_inputs: bool,
    ) -> torch.Tensor:
        backend = operand.backend
        groups = _Groups.of(ends, len(inputs), backend.group_rows)
        rowwise, columnwise = backend.quantize(
            groups.spread(inputs), operand.rounding, rowwise=True, columnwise=keeps_inputs
        )
        assert rowwise is not None
        _save(ctx, columnwise, groups.ends, groups.places)
        ctx.operand, ctx.inputs_dtype, ctx.num_rows = operand, inputs.dtype, groups.num_rows
        output = backend.grouped_product(rowwise, operand.weight.rowwise(), groups.ends, dtype)
        return output[groups.places]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        operand: MXFP8Operand = ctx.operand
        backend = operand.backend
        ends, places = ctx.saved_tensors[-2:]
        groups = _Groups(ends, places, ctx.num_rows)
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        needs_weight = needs_weight and _is_wanted(operand.sink)
        rowwise, columnwise = backend.quantize(
            groups.spread(grad), operand.rounding, rowwise=needs_input, columnwise=needs_weight
        )
        grad_inputs = grad_weight = None
        if rowwise is not None:
            weight = operand.weight.columnwise().mT
            product = backend.grouped_product(rowwise, weight, groups.ends, ctx.inputs_dtype)
            grad_inputs = product[groups.places]
        if columnwise is not None:
            left, right = columnwise.mT, _saved(ctx).mT
            if operand.sink is None:
                shape = (len(groups.ends), left.shape[0], right.shape[0])
                grad_weight = grad.new_empty(shape, dtype=_gradient_dtype(grad))
                target, accumulate = grad_weight, False
            else:
                target, accumulate = operand.sink.gradient_target()
            backend.write_grouped_product(target, left, right, groups.ends, accumulate=accumulate)
        return grad_inputs, grad_weight, None, None, None, None


@dataclass(frozen=True)
class _Groups:
    """Tokens of groups, spread so that every group starts at a multiple of some number of rows.

    Attributes:
        ends: Where each group's rows end, padding included.
        places: The row of each token.
        num_rows: Rows of the spread matrix: a bound that needs no look at ``ends``.
    """

    ends: torch.Tensor
    places: torch.Tensor
    num_rows: int

    @classmethod
    def of(cls, ends: torch.Tensor, num_tokens: int, multiple: int) -> _Groups:
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        sizes = (ends - starts + multiple - 1) // multiple * multiple
        padded_ends = sizes.cumsum(0)
        token = torch.arange(num_tokens, dtype=ends.dtype, device=ends.device)
        group = torch.searchsorted(ends, token, right=True)
        places = token + (padded_ends - sizes - starts)[group]
        bound = (num_tokens + len(ends) * (multiple - 1)) // multiple * multiple
        return cls(padded_ends.int(), places, max(bound, multiple))

    def spread(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = tokens.new_zeros(self.num_rows, tokens.shape[-1])
        return rows.index_copy_(0, self.places, tokens)


def _gradient_dtype(grad: torch.Tensor) -> torch.dtype:
    return torch.promote_types(grad.dtype, torch.float32)


def _is_wanted(sink: GradientSink | None) -> bool:
    return sink is None or sink.is_gradient_wanted()


def _bias_gradient(grad: torch.Tensor, sink: GradientSink | None) -> torch.Tensor | None:
    flat = grad.reshape(-1, grad.shape[-1])
    if sink is None:
        return flat.sum(0)
    target, accumulate = sink.gradient_target()
    if accumulate:
        target.add_(flat.sum(0, dtype=target.dtype))
    else:
        torch.sum(flat, 0, dtype=target.dtype, out=target)
    return None


def _padded(values: torch.Tensor) -> torch.Tensor:
    """``[tokens, features]`` with a number of tokens that blocks divide."""
    flat = values.reshape(-1, values.shape[-1])
    missing = -len(flat) % BLOCK if len(flat) else BLOCK
    return functional.pad(flat, (0, 0, 0, missing)) if missing else flat


def _unpadded(values: torch.Tensor, like: torch.Size) -> torch.Tensor:
    num_tokens = like[:-1].numel()
    return values[:num_tokens].view(*like[:-1], values.shape[-1])


def _save(ctx: Any, blocks: BlockScaled | None, *others: torch.Tensor) -> None:
    # As tensors, so that checkpoints and offloading hooks see them.
    kept = () if blocks is None else (blocks.data, blocks.scales)
    ctx.is_swizzled = blocks is not None and blocks.is_swizzled
    ctx.save_for_backward(*kept, *others)


def _saved(ctx: Any) -> BlockScaled:
    data, scales = ctx.saved_tensors[:2]
    return BlockScaled(data, scales, -2, ctx.is_swizzled)
