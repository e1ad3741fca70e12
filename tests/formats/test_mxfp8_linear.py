"""Linear layers in MXFP8, emulated, against a reference made of torchao's quantizer."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from sshsdp.formats.mxfp8_backends import choose_backend
from sshsdp.formats.mxfp8_blocks import BlockScaled, quantize
from sshsdp.formats.mxfp8_emulation import Emulation
from sshsdp.formats.mxfp8_linear import MXFP8Operand, mxfp8_grouped_linear, mxfp8_linear
from tests.support.compare import assert_within, relative_error
from tests.support.mxfp8_reference import ReferenceLinear, rounded
from tests.support.zoo import Decoder

if TYPE_CHECKING:
    from sshsdp.formats.mxfp8_blocks import ScaleRounding


class QuantizedNow:
    """A weight that is quantized whenever somebody asks for it."""

    def __init__(self, values: torch.Tensor, rounding: ScaleRounding = "rceil") -> None:
        self.values, self.rounding = values, rounding

    def rowwise(self) -> BlockScaled:
        return quantize(self.values, -1, self.rounding)

    def columnwise(self) -> BlockScaled:
        return quantize(self.values, -2, self.rounding)


class Sink:
    """Collects a gradient as a slot of the engine does."""

    def __init__(self, shape: Any, dtype: torch.dtype = torch.float32) -> None:
        self.target = torch.full(tuple(shape), torch.nan, dtype=dtype)
        self.is_written = False
        self.is_wanted = True

    def is_gradient_wanted(self) -> bool:
        return self.is_wanted

    def gradient_target(self) -> tuple[torch.Tensor, bool]:
        accumulate, self.is_written = self.is_written, True
        return self.target, accumulate


class Linear(nn.Module):
    """The subject: ``nn.Linear`` over the same parameters, in MXFP8."""

    def __init__(self, linear: nn.Linear, rounding: ScaleRounding = "rceil") -> None:
        super().__init__()
        self.weight, self.bias, self.rounding = linear.weight, linear.bias, rounding

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        operand = MXFP8Operand(
            weight=QuantizedNow(self.weight.detach(), self.rounding),
            backend=Emulation(),
            rounding=self.rounding,
        )
        return mxfp8_linear(inputs, self.weight, self.bias, operand)


def operand_of(weight: torch.Tensor, **options: Any) -> MXFP8Operand:
    return MXFP8Operand(weight=QuantizedNow(weight), backend=Emulation(), **options)


def spread(values: torch.Tensor) -> torch.Tensor:
    """Magnitudes over 20 octaves.

    Scales are powers of two and elements are floating point: as long as no element is subnormal,
    blocks in either direction give the same values, and a mix-up of the two would go unseen.
    """
    return values * torch.exp2(torch.randint(-16, 4, values.shape).float())


@torch.no_grad()
def spread_weights(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.ndim > 1:
            parameter.copy_(spread(parameter))


def pair(mode: ScaleRounding = "rceil", **options: Any) -> tuple[Linear, ReferenceLinear]:
    torch.manual_seed(0)
    linear = nn.Linear(96, 64, **options)
    spread_weights(linear)
    return Linear(linear, mode), ReferenceLinear(copy.deepcopy(linear), mode)


@pytest.mark.parametrize("mode", ["rceil", "floor", "ceil", "even"])
@pytest.mark.parametrize("shape", [(64,), (2, 40), (3, 1, 7), (1,), ()])
def test_all_three_products_equal_the_reference(shape: tuple[int, ...], mode: Any) -> None:
    subject, reference = pair(mode)
    values = spread(torch.randn(*shape, 96))
    inputs = [values.clone().requires_grad_() for _ in range(2)]
    outputs = [model(x) for model, x in zip((subject, reference), inputs, strict=True)]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-6, atol=1e-6)
    grad = spread(torch.randn_like(outputs[0]))
    for output in outputs:
        output.backward(grad)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(subject.weight.grad, reference.weight.grad, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(subject.bias.grad, reference.bias.grad, rtol=1e-6, atol=1e-6)
    exact = functional.linear(inputs[0], subject.weight, subject.bias)
    assert not torch.equal(outputs[0], exact)
    # Saturation moves an element by an eighth at most, rounding by less; there are two factors.
    assert_within(relative_error(outputs[0], exact), 2 / 8)


def replace_linears(model: nn.Module, kind: Any) -> nn.Module:
    """MXFP8 in all linear layers of the blocks, as the format's default has it."""
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    in_blocks = {name: m for name, m in linears.items() if name.startswith("blocks.")}
    assert in_blocks
    for name, module in in_blocks.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, kind(module))
    return model


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_training_a_decoder_equals_the_reference_at_every_step(optimizer: Any) -> None:
    torch.manual_seed(0)
    model = Decoder(width=32)
    spread_weights(model)
    models = [replace_linears(copy.deepcopy(model), kind) for kind in (Linear, ReferenceLinear)]
    optimizers = [optimizer(each.parameters(), lr=1e-2) for each in models]
    losses: list[list[float]] = [[], []]
    for step in range(10):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 31, (3, 7), generator=generator)
        for each, optim, its_losses in zip(models, optimizers, losses, strict=True):
            logits = each(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optim.step()
            optim.zero_grad()
            its_losses.append(loss.item())
        assert losses[0][-1] == pytest.approx(losses[1][-1], rel=1e-6)
        for mine, theirs in zip(*(each.parameters() for each in models), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    assert losses[0][-1] != losses[0][0]


def test_a_sink_gets_the_weight_gradient_and_further_ones_are_added() -> None:
    subject, reference = pair()
    sinks = Sink(subject.weight.shape), Sink(subject.bias.shape)
    operand = operand_of(subject.weight.detach(), sink=sinks[0], bias_sink=sinks[1])
    for _ in range(2):
        inputs = torch.randn(40, 96)
        mxfp8_linear(inputs, subject.weight, subject.bias, operand).square().sum().backward()
        reference(inputs).square().sum().backward()
        torch.testing.assert_close(sinks[0].target, reference.weight.grad, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(sinks[1].target, reference.bias.grad, rtol=1e-5, atol=1e-4)
    assert subject.weight.grad is None
    assert subject.bias.grad is None


def test_the_weight_gradient_lands_in_the_sinks_dtype_and_strides() -> None:
    subject, reference = pair(bias=False)
    inputs = torch.randn(40, 96)
    reference(inputs).square().sum().backward()
    expected = reference.weight.grad
    assert expected is not None
    for dtype in (torch.bfloat16, torch.float64):
        sink = Sink(expected.shape, dtype)
        operand = operand_of(subject.weight.detach(), sink=sink)
        mxfp8_linear(inputs, subject.weight, None, operand).square().sum().backward()
        torch.testing.assert_close(
            sink.target.double(), expected.to(dtype).double(), rtol=1e-2, atol=1e-2
        )
    sink = Sink(expected.shape)
    sink.target = torch.full((96, 64), torch.nan).mT
    operand = operand_of(subject.weight.detach(), sink=sink)
    mxfp8_linear(inputs, subject.weight, None, operand).square().sum().backward()
    torch.testing.assert_close(sink.target, expected, rtol=1e-5, atol=1e-4)


def test_an_unwanted_gradient_is_not_computed() -> None:
    """``torch.autograd.grad`` for the inputs must leave the reduce input alone."""
    subject, _ = pair(bias=False)
    sink = Sink(subject.weight.shape)
    sink.is_wanted = False
    inputs = torch.randn(32, 96, requires_grad=True)
    operand = operand_of(subject.weight.detach(), sink=sink)
    output = mxfp8_linear(inputs, subject.weight, None, operand)
    torch.autograd.grad(output.sum(), inputs)
    assert not sink.is_written


def test_a_frozen_weight_keeps_no_inputs_and_still_passes_gradients_on() -> None:
    subject, reference = pair()
    subject.requires_grad_(False)
    kept: list[torch.Tensor] = []
    inputs = torch.randn(40, 96, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        output = subject(inputs)
    assert not kept
    output.sum().backward()
    twin = inputs.detach().clone().requires_grad_()
    reference(twin).sum().backward()
    torch.testing.assert_close(inputs.grad, twin.grad, rtol=1e-6, atol=1e-6)


def test_inputs_are_kept_for_backward_at_1_03_bytes_per_element() -> None:
    subject, _ = pair()
    kept: list[torch.Tensor] = []
    inputs = torch.randn(64, 96, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        subject(inputs)
    assert sum(tensor.nbytes for tensor in kept) == inputs.numel() * 33 // 32


def test_the_columnwise_blocks_are_asked_for_in_backward_only() -> None:
    """Forward gathers one orientation and backward the other: neither may touch both."""
    asked: list[str] = []

    class Weight(QuantizedNow):
        def rowwise(self) -> BlockScaled:
            asked.append("rowwise")
            return super().rowwise()

        def columnwise(self) -> BlockScaled:
            asked.append("columnwise")
            return super().columnwise()

    weight = nn.Parameter(torch.randn(64, 96))
    operand = MXFP8Operand(weight=Weight(weight.detach()), backend=Emulation())
    inputs = torch.randn(32, 96, requires_grad=True)
    output = mxfp8_linear(inputs, weight, None, operand)
    assert asked == ["rowwise"]
    output.sum().backward()
    assert asked == ["rowwise", "columnwise"]
    asked.clear()
    mxfp8_linear(inputs.detach(), weight, None, operand).sum().backward()
    assert asked == ["rowwise"]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputing_changes_nothing(use_reentrant: bool) -> None:
    subject, _ = pair()
    twin = copy.deepcopy(subject)
    inputs = torch.randn(40, 96, requires_grad=True)
    subject(inputs).square().sum().backward()
    checkpoint(twin, inputs, use_reentrant=use_reentrant).square().sum().backward()
    assert torch.equal(subject.weight.grad, twin.weight.grad)


# Of the product, the bias and their sum: half a unit in the last of eight places each.
BF16_ROUNDINGS = 3 * 2.0**-8


def test_bfloat16_differs_from_float32_only_in_the_rounding_of_results() -> None:
    subject, _ = pair()
    inputs = torch.randn(64, 96).bfloat16()
    narrow, wide = subject(inputs), subject(inputs.float())
    assert narrow.dtype == torch.bfloat16
    assert_within(relative_error(narrow, wide), BF16_ROUNDINGS)


def test_autocast_decides_the_dtype_of_the_output_and_not_of_the_product() -> None:
    subject, _ = pair()
    inputs = torch.randn(64, 96, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        output = subject(inputs)
    assert output.dtype == torch.bfloat16
    assert_within(relative_error(output, subject(inputs)), BF16_ROUNDINGS)
    output.sum().backward()
    assert inputs.grad is not None
    assert inputs.grad.dtype == torch.float32


def test_no_tokens_give_no_output_and_a_zero_gradient() -> None:
    subject, _ = pair()
    inputs = torch.randn(0, 96, requires_grad=True)
    output = subject(inputs)
    assert output.shape == (0, 64)
    output.sum().backward()
    assert inputs.grad is not None
    assert inputs.grad.shape == (0, 96)
    assert torch.equal(subject.weight.grad, torch.zeros(64, 96))


def test_an_overflow_in_backward_stays_an_overflow() -> None:
    """Loss scaling looks for infinities in gradients: saturation in blocks must not hide them."""
    for mode in ("rceil", "floor", "ceil", "even"):
        subject, _ = pair(mode)
        output = subject(torch.ones(32, 96, requires_grad=True))
        output.backward(torch.full_like(output, torch.inf))
        assert not subject.weight.grad.isfinite().any(), mode


def test_a_second_derivative_is_refused() -> None:
    subject, _ = pair()
    inputs = torch.randn(32, 96, requires_grad=True)
    (grad,) = torch.autograd.grad(subject(inputs).square().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("sizes", [(32, 64), (5, 0, 40), (0, 0, 3), (31, 33, 1, 95), (0, 0)])
@pytest.mark.parametrize("with_sink", [False, True])
def test_packed_experts_equal_one_linear_layer_for_each(
    sizes: tuple[int, ...], with_sink: bool
) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(len(sizes), 64, 96))
    sink = Sink(weight.shape) if with_sink else None
    inputs = torch.randn(sum(sizes), 96, requires_grad=True)
    ends = torch.tensor(sizes).cumsum(0)
    operand = operand_of(weight.detach(), sink=sink)
    output = mxfp8_grouped_linear(inputs, weight, ends, operand)
    experts = [nn.Parameter(each.clone()) for each in weight.detach()]
    twin = inputs.detach().clone().requires_grad_()
    parts = [
        mxfp8_linear(tokens, expert, None, operand_of(expert.detach()))
        for tokens, expert in zip(twin.split(sizes), experts, strict=True)
    ]
    expected = torch.cat(parts)
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
    grad = torch.randn_like(output)
    output.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(inputs.grad, twin.grad, rtol=1e-6, atol=1e-6)
    gradient = weight.grad if sink is None else sink.target
    expected_gradient = torch.stack([expert.grad for expert in experts])
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-6)
    if sink is not None:
        assert weight.grad is None
        again = mxfp8_grouped_linear(inputs.detach(), weight, ends, operand)
        again.backward(grad)
        torch.testing.assert_close(sink.target, 2 * expected_gradient, rtol=1e-6, atol=1e-6)


def test_the_reference_rounds_as_our_quantizer_does() -> None:
    values = torch.randn(64, 96)
    assert torch.equal(rounded(values, -1), quantize(values, -1).dequantize())
    assert torch.equal(rounded(values, 0), quantize(values, -2).dequantize())


@pytest.mark.parametrize("wanted", ["te", "torch"])
def test_a_backend_that_cannot_run_here_is_replaced_with_a_warning(
    wanted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "sshsdp"):
        backend = choose_backend(wanted, torch.device("cpu"), "rceil")
    assert isinstance(backend, Emulation)
    warning, info = caplog.messages
    assert f"MXFP8Format(backend='{wanted}') cannot run on cpu" in warning
    assert "emulation is used instead" in warning
    assert "MXFP8 products on cpu: emulation" in info


def test_the_log_says_which_backend_was_chosen_and_why_not_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "sshsdp"):
        choose_backend("auto", torch.device("cpu"), "rceil")
    (message,) = caplog.messages
    assert "te: needs an NVIDIA GPU; torch: needs an NVIDIA GPU" in message
