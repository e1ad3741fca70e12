"""Zero-copy gradients: module rules that write weight gradients straight into the reduce input.

A rule replaces the forward of a module by one whose backward puts the weight gradient into the view
that `GradientSlot.gradient_target` hands out. Parameters without a rule take their ordinary
gradient through a post-accumulate hook, at the price of one copy (counted in ``engine.stats``).

The numbers are the ones that autograd would compute: the same GEMMs on the same operands.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from sshsdp.parameters.quantized import QuantizedParameter
from sshsdp.parameters.reads import Reads
from sshsdp.parameters.slots import slot_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from sshsdp.parameters.slots import GradientSlot

__all__ = ["install_rules", "linear", "remove_rules", "runs_by_rule"]


class _Linear(torch.autograd.Function):
    """``functional.linear`` whose backward writes into the slots of weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        weight_slot: GradientSlot,
        bias_slot: GradientSlot | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.slots = weight_slot, bias_slot
        return functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        inputs, weight = ctx.saved_tensors
        weight_slot, bias_slot = ctx.slots
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # Reached without the unit's output hook (a side output): the weight may be freed.
        weight_slot.unit.wait(Reads.BACKWARD)
        flat_grad = grad.reshape(-1, grad.shape[-1])
        flat_inputs = inputs.reshape(-1, inputs.shape[-1])
        grad_inputs = grad.matmul(weight) if needs_input else None
        if torch.is_grad_enabled():
            # create_graph=True: the gradients must be differentiable tensors.
            grad_weight = flat_grad.t().mm(flat_inputs) if needs_weight else None
            grad_bias = flat_grad.sum(0) if needs_bias else None
            return grad_inputs, grad_weight, grad_bias, None, None
        if needs_weight and weight_slot.is_gradient_wanted():
            _write_product(weight_slot, flat_grad.t(), flat_inputs)
        if needs_bias and bias_slot.is_gradient_wanted():
            _write_sum(bias_slot, flat_grad)
        return grad_inputs, None, None, None, None


class _Embedding(torch.autograd.Function):
    """``functional.embedding`` whose backward writes into the slot of the table."""

    @staticmethod
    def forward(
        ctx: Any,
        indices: torch.Tensor,
        weight: torch.Tensor,
        padding_index: int,
        slot: GradientSlot,
    ) -> torch.Tensor:
        ctx.save_for_backward(indices)
        ctx.padding_index, ctx.slot, ctx.num_embeddings = padding_index, slot, len(weight)
        return functional.embedding(
            indices, weight, padding_idx=padding_index if padding_index >= 0 else None
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        (indices,) = ctx.saved_tensors
        slot: GradientSlot = ctx.slot
        if torch.is_grad_enabled():
            return None, _dense_embedding_gradient(ctx, grad, indices), None, None
        if not slot.is_gradient_wanted():
            return None, None, None, None
        if slot.was_written or grad.dtype != slot.space.reduce_dtype or not grad.is_cpu:
            # On accelerators the dense kernel sorts first, which is faster and deterministic.
            slot.accept_gradient(_dense_embedding_gradient(ctx, grad, indices))
            return None, None, None, None
        target, _ = slot.gradient_target()
        flat_indices = indices.reshape(-1)
        flat_grad = grad.reshape(-1, grad.shape[-1])
        if ctx.padding_index >= 0:
            flat_grad = flat_grad.masked_fill((flat_indices == ctx.padding_index)[:, None], 0)
        target.zero_().index_add_(0, flat_indices, flat_grad)
        return None, None, None, None


def _dense_embedding_gradient(ctx: Any, grad: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.ops.aten.embedding_dense_backward(
        grad, indices, ctx.num_embeddings, ctx.padding_index, False
    )
    return result


def _write_product(slot: GradientSlot, left: torch.Tensor, right: torch.Tensor) -> None:
    """``left @ right`` into the slot's gradient, in the reduce dtype."""
    dtype = slot.space.reduce_dtype
    widens = left.is_cuda and dtype == torch.float32
    if not (dtype == left.dtype == right.dtype) and not widens:
        slot.accept_gradient(left.mm(right))
        return
    target, accumulate = slot.gradient_target()
    if dtype == left.dtype:
        if accumulate:
            target.addmm_(left, right)
        else:
            torch.mm(left, right, out=target)
    # The tensor cores accumulate in fp32 anyway: keep that instead of rounding to bf16.
    elif accumulate:
        torch.addmm(target, left, right, out_dtype=torch.float32, out=target)
    else:
        torch.mm(left, right, out_dtype=torch.float32, out=target)


def _write_sum(slot: GradientSlot, grad: torch.Tensor) -> None:
    """The sum of ``grad`` over its rows into the slot's gradient."""
    if slot.was_written or grad.dtype != slot.space.reduce_dtype:
        slot.accept_gradient(grad.sum(0))
    else:
        target, _ = slot.gradient_target()
        torch.sum(grad, 0, out=target)


def _slot_with_gradient(parameter: torch.Tensor | None) -> GradientSlot | None:
    if parameter is None or not parameter.requires_grad:
        return None
    return slot_of(parameter)


def runs_by_rule(module: nn.Linear, inputs: torch.Tensor) -> bool:
    """Whether `linear` would take the zero-copy path."""
    if isinstance(module.weight, QuantizedParameter):
        return True
    slots = _slot_with_gradient(module.weight), _slot_with_gradient(module.bias)
    return (
        slots[0] is not None
        and (module.bias is None or slots[1] is not None)
        and torch.is_grad_enabled()
        and _autocast(inputs, module.weight).dtype == module.weight.dtype
        and not _is_cast_by_autocast(module.weight)
        and not torch.compiler.is_compiling()
    )


def _is_cast_by_autocast(weight: torch.Tensor) -> bool:
    # Autocast would run the product in another dtype than the weight's, and its backward as well.
    kind = weight.device.type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != weight.dtype


def _autocast(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    device_type = inputs.device.type
    if torch.is_autocast_enabled(device_type) and inputs.is_floating_point():
        dtype = torch.get_autocast_dtype(device_type)
        return inputs.to(dtype) if weight.dtype == dtype else inputs
    return inputs


def linear(
    module: nn.Linear,
    inputs: torch.Tensor,
    *,
    weight: nn.Parameter | None = None,
    bias: nn.Parameter | None = None,
) -> torch.Tensor:
    """A linear module's forward, with zero-copy weight gradients where they are possible.

    Args:
        module: The module.
        inputs: ``[..., in_features]``.
        weight: Used instead of the module's own, with ``bias`` (a pack's).
        bias: See ``weight``.
    """
    if not runs_by_rule(module, inputs):
        return functional.linear(inputs, module.weight, module.bias)
    used: tuple[torch.Tensor, torch.Tensor | None] = (
        (module.weight, module.bias) if weight is None else (weight, bias)
    )
    if isinstance(used[0], QuantizedParameter):
        # It runs its own product, and its gradients land in the same place.
        return functional.linear(inputs, *used)
    slots = slot_of(used[0]), slot_of(used[1])
    apply: Callable[..., torch.Tensor] = _Linear.apply
    return apply(_autocast(inputs, used[0]), *used, *slots)


def _embedding_forward(module: nn.Embedding, inputs: torch.Tensor) -> torch.Tensor:
    slot = _slot_with_gradient(module.weight)
    if slot is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return nn.Embedding.forward(module, inputs)
    padding_index = -1 if module.padding_idx is None else module.padding_idx
    apply: Callable[..., torch.Tensor] = _Embedding.apply
    return apply(inputs, module.weight, padding_index, slot)


def _has_plain_embedding(module: nn.Embedding) -> bool:
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


def _rule_for(module: nn.Module) -> Callable[..., torch.Tensor] | None:
    # A subclass with a forward of its own does something else than the rule would.
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return linear
    if (
        isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and _has_plain_embedding(module)
    ):
        return _embedding_forward
    return None


def install_rules(model: nn.Module) -> list[nn.Module]:
    """Give every module that has a rule its zero-copy forward; returns those modules."""
    changed = []
    for module in model.modules():
        rule = _rule_for(module)
        if rule is not None and "forward" not in module.__dict__:
            module.forward = functools.partial(rule, module)
            changed.append(module)
    return changed


def remove_rules(modules: list[nn.Module]) -> None:
    """Give modules their class's forward back."""
    for module in modules:
        module.__dict__.pop("forward", None)
