"""Runtime parameters in MXFP8, as modules see them while they are gathered.

Note: a quantized parameter is multiplied, not read. It answers for its shape and dtype like any
parameter. Products with it run on its blocks: ``functional.linear(x, weight)``, ``x @ weight.T``,
for a batch of matrices also ``weight[index]`` and ``grouped_mm(x, weight.mT, offs=...)``. Asking
for another dtype (``.float()``, ``.to(...)``) or for ``.dequantize()`` gives its values as an
ordinary tensor. Everything else raises an error that says how to keep the parameter dense: a
conversion that nobody asked for would hold dense copies of all weights until backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from sshsdp.formats.mxfp8_linear import MXFP8Operand, mxfp8_grouped_linear, mxfp8_linear
from sshsdp.parameters.reads import Reads
from sshsdp.parameters.sharded import is_identity, is_metadata, property_getter
from sshsdp.parameters.slots import slot_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sshsdp.formats.mxfp8 import MXFP8Format, Orientation
    from sshsdp.formats.mxfp8_blocks import BlockScaled
    from sshsdp.formats.mxfp8_gemm import GemmBackend
    from sshsdp.layout.address_space import Region
    from sshsdp.parameters.slots import GradientSlot

__all__ = ["QuantizedParameter", "QuantizedView"]


class QuantizedParameter(nn.Parameter):
    """The class of a runtime parameter in MXFP8 while its unit is gathered."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Let metadata through, run products on the blocks, refuse the rest."""
        kwargs = kwargs or {}
        if is_metadata(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return _run(func, args, kwargs)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values that forward multiplies with, as an ordinary tensor.

        Its gradient is the parameter's: rounding is passed over.

        Args:
            dtype: Of the result; default: the parameter's.
        """
        return _dense(QuantizedView(self), dtype or self.dtype)

    def __repr__(self) -> str:  # type: ignore[override]  # torch names an argument oddly
        """Name and metadata: values would have to be dequantized."""
        return (
            f"QuantizedParameter({_slot(self).name!r}, shape={tuple(self.shape)}, "
            f"dtype={self.dtype}, requires_grad={self.requires_grad})"
        )


@dataclass(frozen=True, eq=False)
class QuantizedView:
    """A quantized parameter, one matrix of it, or the transpose of either; it has no values yet.

    Attributes:
        parameter: The parameter.
        index: Which matrix of a batch; None: all of it.
        is_transposed: Its last two dims are swapped.
    """

    parameter: QuantizedParameter
    index: int | None = None
    is_transposed: bool = False

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Products on the blocks."""
        return _run(func, args, kwargs or {})

    @property
    def shape(self) -> torch.Size:
        """As of a tensor."""
        shape = [*self.parameter.shape] if self.index is None else [*self.parameter.shape[1:]]
        if self.is_transposed:
            shape[-2:] = shape[:-3:-1]
        return torch.Size(shape)

    @property
    def ndim(self) -> int:
        """As of a tensor."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> torch.Size | int:
        """As of a tensor."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """As of a tensor."""
        return self.ndim

    @property
    def dtype(self) -> torch.dtype:
        """What the parameter passes for."""
        return self.parameter.dtype

    @property
    def device(self) -> torch.device:
        """As of a tensor."""
        return self.parameter.device

    @property
    def requires_grad(self) -> bool:
        """As of a tensor."""
        return self.parameter.requires_grad

    @property
    def mT(self) -> QuantizedView:
        """The transpose of the last two dims."""
        return QuantizedView(self.parameter, self.index, not self.is_transposed)

    @property
    def T(self) -> QuantizedView:
        """The transpose of a matrix."""
        return self.t()

    def t(self) -> QuantizedView:
        """The transpose of a matrix."""
        if self.ndim != 2:
            raise RuntimeError(_message("t", self.parameter))
        return self.mT

    def transpose(self, dim0: int, dim1: int) -> QuantizedView:
        """As of a tensor; of the last two dims only."""
        last = {self.ndim - 2, self.ndim - 1}
        if {dim0 % self.ndim, dim1 % self.ndim} != last:
            raise RuntimeError(_message(f"transpose({dim0}, {dim1})", self.parameter))
        return self.mT

    def __getitem__(self, index: Any) -> QuantizedView:
        """One matrix of a batch."""
        is_number = isinstance(index, int) or (
            isinstance(index, torch.Tensor) and not index.ndim and not index.is_floating_point()
        )
        if self.ndim != 3 or not is_number or isinstance(index, bool):
            raise RuntimeError(_message("__getitem__", self.parameter))
        return QuantizedView(self.parameter, range(len(self.parameter))[index], self.is_transposed)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values, see `QuantizedParameter.dequantize`."""
        return _dense(self, dtype or self.dtype)

    def __getattr__(self, name: str) -> Any:
        """Name the parameter whose values were meant to be read."""
        raise AttributeError(_message(name, self.parameter))


# Blocks and gradients of a view


@dataclass(frozen=True)
class _Weight:
    """Where a view's blocks come from: its unit is gathered when they are asked for."""

    slot: GradientSlot
    index: int | None

    def rowwise(self) -> BlockScaled:
        return self._blocks("rowwise", Reads.FORWARD)

    def columnwise(self) -> BlockScaled:
        # Backward may come here without the unit's output hook (a side output).
        return self._blocks("columnwise", Reads.BACKWARD)

    def _blocks(self, orientation: Orientation, reads: Reads) -> BlockScaled:
        self.slot.unit.wait(reads)
        blocks = _side(self.slot).blocks(self.slot.place, orientation)
        return blocks if self.index is None else blocks[self.index]


@dataclass(frozen=True)
class _MatrixSink:
    """Takes the gradient of one matrix of a batch."""

    slot: GradientSlot
    index: int

    def is_gradient_wanted(self) -> bool:
        return self.slot.is_gradient_wanted()

    def gradient_target(self) -> tuple[torch.Tensor, bool]:
        target, accumulate = self.slot.gradient_target()
        if not accumulate:
            # The other matrices may get no gradient at all.
            target.zero_()
        return target[self.index], True


class _BlockSide(Protocol):
    """What is asked of the runtime side of a space in MXFP8."""

    backend: GemmBackend
    runtime_format: MXFP8Format

    def blocks(self, region: Region, orientation: Orientation) -> BlockScaled: ...


def _side(slot: GradientSlot) -> _BlockSide:
    side: _BlockSide = slot.space.runtime
    return side


def _slot(parameter: QuantizedParameter) -> GradientSlot:
    slot = slot_of(parameter)
    assert slot is not None
    return slot


def _operand(view: QuantizedView, bias: torch.Tensor | None = None) -> MXFP8Operand:
    slot = _slot(view.parameter)
    side = _side(slot)
    return MXFP8Operand(
        weight=_Weight(slot, view.index),
        backend=side.backend,
        rounding=side.runtime_format.rounding,
        sink=slot if view.index is None else _MatrixSink(slot, view.index),
        bias_sink=slot_of(bias),
    )


class _Dequantize(torch.autograd.Function):
    """Values of the rowwise blocks; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, view: QuantizedView, dtype: torch.dtype) -> Any:
        ctx.index, ctx.leaf_shape = view.index, view.parameter.shape
        return _Weight(_slot(view.parameter), view.index).rowwise().dequantize(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        if ctx.index is not None:
            whole = grad.new_zeros(ctx.leaf_shape)
            whole[ctx.index] = grad
            grad = whole
        return grad, None, None


def _dense(view: QuantizedView, dtype: torch.dtype) -> torch.Tensor:
    apply: Callable[..., torch.Tensor] = _Dequantize.apply
    values = apply(view.parameter, view, dtype)
    return values.mT if view.is_transposed else values


# What may be done with them


def _run(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    handler = _HANDLERS.get(func)
    result = NotImplemented if handler is None else handler(*args, **kwargs)
    if result is NotImplemented:
        values = [*args, *kwargs.values()]
        flat = [
            v for value in values for v in (value if isinstance(value, (list, tuple)) else [value])
        ]
        views = [_as_view(value) for value in flat]
        parameter = next(view.parameter for view in views if view is not None)
        raise RuntimeError(_message(getattr(func, "__name__", str(func)), parameter))
    return result


def _message(operation: str, parameter: QuantizedParameter) -> str:
    name = _slot(parameter).name
    return (
        f"{operation}: parameter {name!r} is in MXFP8 and can only be multiplied, by "
        "functional.linear(x, weight), x @ weight.T, or for experts weight[index] and "
        "functional.grouped_mm(x, weight.mT, offs=...). Read its values with .dequantize() or "
        ".to(another dtype), write them under `with engine.unsharded(writes=True)`, or keep it "
        f"dense: RuntimePolicy(formats={{{name!r}: sshsdp.DenseFormat()}})"
    )


def _as_view(value: Any) -> QuantizedView | None:
    if isinstance(value, QuantizedView):
        return value
    return QuantizedView(value) if isinstance(value, QuantizedParameter) else None


def _linear(inputs: Any, weight: Any, bias: torch.Tensor | None = None) -> Any:
    view = _as_view(weight)
    if view is None or view.is_transposed or view.ndim != 2 or _as_view(inputs) is not None:
        return NotImplemented
    return mxfp8_linear(inputs, view.parameter, bias, _operand(view, bias))


def _matmul(inputs: Any, weight: Any) -> Any:
    view = _as_view(weight)
    return NotImplemented if view is None else _linear(inputs, view.mT)


def _grouped_mm(inputs: Any, weight: Any, offs: torch.Tensor | None = None, **options: Any) -> Any:
    view = _as_view(weight)
    plain = all(value is None for value in options.values())
    if view is None or not view.is_transposed or view.ndim != 3 or offs is None or not plain:
        return NotImplemented
    return mxfp8_grouped_linear(inputs, view.parameter, offs, _operand(view))


def _convert(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda weight: _dense(QuantizedView(weight), dtype)


def _to(weight: QuantizedParameter, *args: Any, **kwargs: Any) -> Any:
    if is_identity(weight, args, kwargs):
        return weight
    _, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    return _dense(QuantizedView(weight), dtype or weight.dtype).to(*args, **kwargs)


_tensor: Any = torch.Tensor
_HANDLERS: dict[Any, Callable[..., Any]] = {
    functional.linear: _linear,
    **dict.fromkeys(
        (torch.matmul, torch.mm, _tensor.matmul, _tensor.mm, _tensor.__matmul__), _matmul
    ),
    torch._grouped_mm: _grouped_mm,
    functional.grouped_mm: _grouped_mm,
    _tensor.__getitem__: lambda weight, index: QuantizedView(weight)[index],
    _tensor.transpose: lambda weight, *dims: QuantizedView(weight).transpose(*dims),
    torch.transpose: lambda weight, *dims: QuantizedView(weight).transpose(*dims),
    _tensor.t: lambda weight: QuantizedView(weight).t(),
    torch.t: lambda weight: QuantizedView(weight).t(),
    property_getter("T"): lambda weight, *_: QuantizedView(weight).T,
    property_getter("mT"): lambda weight, *_: QuantizedView(weight).mT,
    _tensor.to: _to,
    _tensor.float: _convert(torch.float32),
    _tensor.double: _convert(torch.float64),
    _tensor.half: _convert(torch.float16),
    _tensor.bfloat16: _convert(torch.bfloat16),
}
