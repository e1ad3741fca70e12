"""How operands are handed to torch's and Transformer Engine's kernels.

The kernels need a Blackwell GPU; their *contracts* do not. Stand-ins that follow the documented
contract (which matrix is read in which direction, scales in tiles of 128 x 4) check everything up
to the kernel. The tests marked ``gpu`` run the kernels themselves.
"""

from __future__ import annotations

import sys
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional
from torchao.prototype.moe_training.kernels.mxfp8.quant import torch_to_blocked_2d_K_groups

from sshsdp.formats import mxfp8_te, mxfp8_torch
from sshsdp.formats.mxfp8_blocks import BlockScaled, quantize
from sshsdp.formats.mxfp8_emulation import Emulation
from sshsdp.formats.mxfp8_linear import MXFP8Operand, mxfp8_grouped_linear, mxfp8_linear
from sshsdp.formats.mxfp8_scales import swizzle, unswizzle
from sshsdp.formats.mxfp8_te import TransformerEngine, te_parameter
from sshsdp.formats.mxfp8_torch import TorchScaled, tiles_by_group
from tests.formats.test_mxfp8_linear import QuantizedNow, Sink, operand_of, spread

if TYPE_CHECKING:
    from sshsdp.formats.mxfp8_gemm import GemmBackend

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def values_of(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``[rows, columns]`` with swizzled scales along the columns, as values."""
    assert scales.dtype == E8M0
    assert scales.is_contiguous()
    plain = unswizzle(scales.flatten(), data.shape[0], data.shape[1] // 32)
    return BlockScaled(data.contiguous(), plain, -1).dequantize()


class FakeScaledMM:
    """`functional.scaled_mm` and its grouped form by their contract, on the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layouts: list[tuple[bool, bool]] = []
        monkeypatch.setattr(functional, "scaled_mm", self.scaled_mm)
        monkeypatch.setattr(functional, "scaled_grouped_mm", self.scaled_grouped_mm)
        monkeypatch.setattr(torch.ops.aten._scaled_mm_v2, "out", self.out, raising=False)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: self.capability)
        monkeypatch.setattr(mxfp8_torch, "_runs_grouped", lambda device: True)
        self.capability = (10, 0)

    def multiply(self, a: Any, b: Any, scale_a: Any, scale_b: Any) -> torch.Tensor:
        assert a.dtype == b.dtype == E4M3
        self.layouts.append((a.is_contiguous(), b.mT.is_contiguous()))
        return values_of(a, scale_a) @ values_of(b.mT, scale_b).mT

    def scaled_mm(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        scale_a: torch.Tensor,
        recipe_a: Any,
        scale_b: torch.Tensor,
        recipe_b: Any,
        *,
        swizzle_a: Any,
        swizzle_b: Any,
        output_dtype: torch.dtype,
    ) -> torch.Tensor:
        assert recipe_a == recipe_b == functional.ScalingType.BlockWise1x32
        assert swizzle_a == swizzle_b == functional.SwizzleType.SWIZZLE_32_4_4
        return self.multiply(a, b, scale_a, scale_b).to(output_dtype)

    def out(self, a: Any, b: Any, scale_a: Any, *rest: Any, out: torch.Tensor) -> None:
        recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b, bias, dtype = rest
        assert recipe_a == recipe_b == [functional.ScalingType.BlockWise1x32.value]
        assert swizzle_a == swizzle_b == [functional.SwizzleType.SWIZZLE_32_4_4.value]
        assert bias is None
        assert dtype == out.dtype
        assert out.is_contiguous()
        out.copy_(self.multiply(a, b, scale_a[0], scale_b[0]))

    def scaled_grouped_mm(
        self,
        a: Any,
        b: Any,
        scale_a: Any,
        recipe_a: Any,
        scale_b: Any,
        recipe_b: Any,
        **options: Any,
    ) -> torch.Tensor:
        ends = options["offs"]
        assert ends.dtype == torch.int32
        assert a.is_contiguous()
        assert b.mT.is_contiguous()
        assert scale_a.ndim == 2
        assert scale_b.ndim == 2
        stops = ends.tolist()
        starts = [0, *stops[:-1]]
        bounds = list(zip(starts, stops, strict=True))
        if b.ndim == 3:
            # Each group's rows are whole tiles; one line of scales per group's matrix.
            left = values_of(a, scale_a)
            out = torch.full((len(a), b.shape[-1]), torch.nan)
            for (start, stop), matrix, scales in zip(bounds, b, scale_b, strict=True):
                out[start:stop] = left[start:stop] @ values_of(matrix.mT, scales).mT
            return out.to(options["output_dtype"])
        # Scales of each group's columns, tiled as a matrix of their own, one after another.
        products = []
        for start, stop in bounds:
            sides = []
            for data, scales in ((a, scale_a), (b.mT, scale_b)):
                height = -(-len(data) // 128) * 128
                flat = scales.flatten()[start // 32 * height : stop // 32 * height]
                sides.append(values_of(data[:, start:stop], flat))
            products.append(sides[0] @ sides[1].mT)
        return torch.stack(products).to(options["output_dtype"])


@pytest.mark.parametrize("capability", [(10, 0), (12, 0)])
@pytest.mark.parametrize("num_tokens", [128, 40])
def test_torchs_products_equal_emulation(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int, capability: tuple[int, int]
) -> None:
    fake = FakeScaledMM(monkeypatch)
    fake.capability = capability
    compare_backends(TorchScaled(), num_tokens)
    assert len(fake.layouts) == 3 + 3
    if capability == (12, 0):
        assert set(fake.layouts) == {(True, True)}
    else:
        # Forward, input gradient, weight gradient: nothing is transposed in memory.
        assert set(fake.layouts) == {(True, True), (True, False), (False, False)}


def compare_backends(backend: GemmBackend, num_tokens: int) -> None:
    """Two backwards, the second one accumulating, against emulation."""
    torch.manual_seed(0)
    weight = spread(torch.randn(160, 96))
    inputs, grad = spread(torch.randn(num_tokens, 96)), spread(torch.randn(num_tokens, 160))
    results = []
    for chosen in (backend, Emulation()):
        sink, leaf = Sink(weight.shape), torch.nn.Parameter(weight)
        operand = MXFP8Operand(weight=QuantizedNow(weight), backend=chosen, sink=sink)
        for _ in range(2):
            tokens = inputs.clone().requires_grad_()
            output = mxfp8_linear(tokens, leaf, None, operand)
            output.backward(grad)
        results.append((output, tokens.grad, sink.target))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_torchs_grouped_products_equal_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeScaledMM(monkeypatch)
    torch.manual_seed(0)
    sizes = (130, 0, 5, 256)
    weight = spread(torch.randn(len(sizes), 160, 96))
    inputs = spread(torch.randn(sum(sizes), 96))
    grad = torch.randn(sum(sizes), 160)
    ends = torch.tensor(sizes).cumsum(0)
    results = []
    for backend in (TorchScaled(), Emulation()):
        sink, leaf = Sink(weight.shape), torch.nn.Parameter(weight)
        operand = MXFP8Operand(weight=QuantizedNow(weight), backend=backend, sink=sink)
        tokens = inputs.clone().requires_grad_()
        output = mxfp8_grouped_linear(tokens, leaf, ends, operand)
        output.backward(grad)
        results.append((output, tokens.grad, sink.target))
    for actual, expected in zip(*results, strict=True):
        # The grouped kernel's results are bfloat16.
        torch.testing.assert_close(actual, expected, rtol=2**-7, atol=1e-3)


def test_scales_by_group_are_torchaos() -> None:
    ends = torch.tensor([128, 128, 512, 640])
    scales = torch.randint(0, 255, (160, 20), dtype=torch.uint8)
    tiles = swizzle(scales.view(E8M0))
    expected, _ = torch_to_blocked_2d_K_groups(scales, ends // 32)
    actual = tiles_by_group(tiles, 160, ends).view(torch.uint8)
    assert actual.shape == (256, 20)
    assert torch.equal(actual.flatten(), expected.flatten()[: actual.numel()])


def test_weights_with_swizzled_scales_multiply_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rowwise scales that publish has swizzled already go to the kernel as they are."""
    FakeScaledMM(monkeypatch)
    weight = spread(torch.randn(256, 128))
    plain = quantize(weight, -1)
    swizzled = BlockScaled(plain.data, swizzle(plain.scales), -1, is_swizzled=True)
    inputs = quantize(spread(torch.randn(64, 128)), -1)
    expected = Emulation().product(inputs, plain, torch.float32)
    for backend in (TorchScaled(), Emulation()):
        actual = backend.product(inputs, swizzled, torch.float32)
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("capability", "why"),
    [((9, 0), "needs compute capability 10.0, and the GPU has (9, 0)"), ((10, 0), None)],
)
def test_torchs_products_need_blackwell(
    monkeypatch: pytest.MonkeyPatch, capability: Any, why: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    assert TorchScaled.why_not(torch.device("cuda"), "rceil") == why


class DType(IntEnum):
    kFloat8E4M3 = 7


class FakeStorage(SimpleNamespace):
    """Transformer Engine's ``MXFP8TensorStorage``: the attributes that its GEMM reads."""


class FakeTE:
    """As much of Transformer Engine 2.12 as the backend uses, by its documented contract.

    ``general_gemm(A, B, layout)`` is column-major BLAS: the row-major result is ``B' @ A'``, where
    a matrix is read rowwise (``A`` under T, ``B`` under N) or columnwise (otherwise).
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, swizzles: bool, version: str) -> None:
        self.layouts: list[str] = []
        self.is_available = (True, "")
        self.swizzles = swizzles
        te, top = ModuleType("transformer_engine.pytorch"), ModuleType("transformer_engine")
        gemms = ModuleType("transformer_engine.pytorch.cpp_extensions")
        tex = ModuleType("transformer_engine_torch")
        contents: dict[ModuleType, dict[str, Any]] = {
            top: {"__version__": version},
            te: {
                "MXFP8Quantizer": self.quantizer,
                "MXFP8TensorStorage": self.storage,
                "MXFP8Tensor": FakeStorage,
                "is_mxfp8_available": lambda return_reason: self.is_available,
            },
            gemms: {"general_gemm": self.general_gemm},
            tex: {"DType": DType},
        }
        for module, attributes in contents.items():
            monkeypatch.setitem(sys.modules, module.__name__, module)
            for name, value in attributes.items():
                setattr(module, name, value)
        mxfp8_te._import.cache_clear()

    def storage(self, **given: Any) -> FakeStorage:
        return FakeStorage(**{f"_{name}": value for name, value in given.items()})

    def quantizer(self, dtype: Any, *, rowwise: bool, columnwise: bool) -> Any:
        assert dtype == DType.kFloat8E4M3

        class Quantizer:
            internal = optimize_for_gemm = False

            def __call__(this, values: torch.Tensor) -> FakeStorage:
                assert this.internal
                assert this.optimize_for_gemm
                made: dict[str, Any] = {"_with_gemm_swizzled_scales": self.swizzles}
                for kind, dim, wanted in (
                    ("rowwise", -1, rowwise),
                    ("columnwise", -2, columnwise),
                ):
                    blocks = quantize(values, dim)  # type: ignore[arg-type]
                    made[f"_{kind}_data"] = blocks.data.view(torch.uint8) if wanted else None
                    made[f"_{kind}_scale_inv"] = self.scales(blocks) if wanted else None
                return FakeStorage(**made)

        return Quantizer()

    def scales(self, blocks: BlockScaled) -> torch.Tensor:
        """As Transformer Engine holds them: padded to tiles, swizzled or not."""
        tile = (128, 4) if blocks.dim == -1 else (4, 128)
        missing = [-n % m for n, m in zip(blocks.scales.shape, tile, strict=True)]
        plain = blocks.scales.view(torch.uint8)
        padded = functional.pad(plain, (0, missing[1], 0, missing[0]))
        if not self.swizzles:
            return padded
        along = plain if blocks.dim == -1 else plain.mT
        return swizzle(along.contiguous()).view(padded.shape)

    def read(self, tensor: FakeStorage, kind: str) -> torch.Tensor:
        data, scales = getattr(tensor, f"_{kind}_data"), getattr(tensor, f"_{kind}_scale_inv")
        assert data.dtype == scales.dtype == torch.uint8
        rows, columns = data.shape
        is_rowwise = kind == "rowwise"
        shape = (rows, columns // 32) if is_rowwise else (rows // 32, columns)
        tile = (128, 4) if is_rowwise else (4, 128)
        assert scales.shape == tuple(n + -n % m for n, m in zip(shape, tile, strict=True))
        if tensor._with_gemm_swizzled_scales:
            along = shape if is_rowwise else shape[::-1]
            plain = unswizzle(scales.flatten(), *along)
            plain = plain if is_rowwise else plain.mT
        else:
            plain = scales[: shape[0], : shape[1]]
        blocks = BlockScaled(data.view(E4M3), plain.contiguous().view(E8M0), -1)
        return BlockScaled(blocks.data, blocks.scales, -1 if is_rowwise else -2).dequantize()

    def general_gemm(
        self,
        a: FakeStorage,
        b: FakeStorage,
        *,
        layout: str,
        out_dtype: torch.dtype,
        out: torch.Tensor | None = None,
        accumulate: bool = False,
    ) -> tuple[torch.Tensor, None, None, None]:
        self.layouts.append(layout)
        right = self.read(a, "rowwise" if layout[0] == "T" else "columnwise")
        left = self.read(b, "rowwise" if layout[1] == "N" else "columnwise")
        product = (left if layout[1] == "N" else left.mT) @ (
            right.mT if layout[0] == "T" else right
        )
        if out is None:
            return product.to(out_dtype), None, None, None
        assert out.is_contiguous()
        assert out_dtype == out.dtype
        out.copy_(out + product if accumulate else product)
        return out, None, None, None


@pytest.fixture
def without_te(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Forget what was found out about an installed Transformer Engine, before and after."""
    mxfp8_te._import.cache_clear()
    yield
    mxfp8_te._import.cache_clear()


@pytest.mark.usefixtures("without_te")
@pytest.mark.parametrize("swizzles", [True, False])
@pytest.mark.parametrize("num_tokens", [128, 40])
def test_transformer_engines_products_equal_emulation(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int, swizzles: bool
) -> None:
    te = FakeTE(monkeypatch, swizzles=swizzles, version="2.12.0")
    compare_backends(TransformerEngine(), num_tokens)
    assert te.layouts == ["TN", "NN", "NT"] * 2


@pytest.mark.usefixtures("without_te")
def test_transformer_engine_writes_a_transposed_target_without_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FakeTE(monkeypatch, swizzles=True, version="2.12.0")
    grad, inputs = (quantize(torch.randn(64, size), -2).mT for size in (96, 160))
    target = torch.full((160, 96), torch.nan).mT
    TransformerEngine().write_product(target, grad, inputs, accumulate=False)
    expected = Emulation().product(grad, inputs, torch.float32)
    torch.testing.assert_close(target, expected)


@pytest.mark.usefixtures("without_te")
def test_a_weight_for_transformer_engines_modules_shares_our_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FakeTE(monkeypatch, swizzles=True, version="2.12.0")
    rowwise, columnwise = (quantize(torch.randn(256, 128), dim) for dim in (-1, -2))  # type: ignore[arg-type]
    weight: Any = te_parameter(rowwise, columnwise, torch.bfloat16)
    assert weight.rowwise_data.data_ptr() == rowwise.data.data_ptr()
    assert weight.rowwise_scale_inv.data_ptr() == rowwise.scales.data_ptr()
    assert weight.columnwise_data.data_ptr() == columnwise.data.data_ptr()
    assert weight.columnwise_scale_inv.data_ptr() == columnwise.scales.data_ptr()
    assert weight.shape == (256, 128)
    small = [quantize(torch.randn(96, 128), dim) for dim in (-1, -2)]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="multiples of 128"):
        te_parameter(*small, torch.bfloat16)


@pytest.mark.usefixtures("without_te")
def test_why_transformer_engine_is_not_used_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.device("cpu"))
    cuda = torch.device("cuda")
    assert TransformerEngine.why_not(torch.device("cpu"), "rceil") == "needs an NVIDIA GPU"
    assert "rounding='rceil' only" in (TransformerEngine.why_not(cuda, "floor") or "")
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    absent = TransformerEngine.why_not(cuda, "rceil") or ""
    assert "cannot be imported" in absent
    assert "pip install 'sshsdp[te]'" in absent
    FakeTE(monkeypatch, swizzles=True, version="2.5.0")
    assert "needs Transformer Engine 2.12" in (TransformerEngine.why_not(cuda, "rceil") or "")
    te = FakeTE(monkeypatch, swizzles=True, version="2.13.0+abc")
    assert TransformerEngine.why_not(cuda, "rceil") is None
    te.is_available = (False, "Device compute capability 10.0 or higher required")
    assert "capability 10.0" in (TransformerEngine.why_not(cuda, "rceil") or "")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [TorchScaled, TransformerEngine, Emulation])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_on_the_gpu_equal_emulation_on_the_cpu(
    kind: type[GemmBackend], dtype: torch.dtype
) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    reason = kind.why_not(device, "rceil")
    if reason is not None:
        pytest.skip(reason)
    torch.manual_seed(0)
    weight = torch.randn(384, 256)
    inputs, grad = torch.randn(100, 256), torch.randn(100, 384)
    results = []
    for backend, where in ((kind(), device), (Emulation(), torch.device("cpu"))):
        sink, leaf = Sink(weight.shape), torch.nn.Parameter(weight.to(where))
        sink.target = sink.target.to(where)
        operand = MXFP8Operand(weight=QuantizedNow(weight.to(where)), backend=backend, sink=sink)
        for _ in range(2):
            tokens = inputs.to(where, dtype).requires_grad_()
            output = mxfp8_linear(tokens, leaf, None, operand)
            output.backward(grad.to(where, dtype))
        results.append([tensor.cpu().float() for tensor in (output, tokens.grad, sink.target)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=2**-6, atol=2**-5)


@pytest.mark.gpu
def test_quantizing_on_the_gpu_gives_the_cpus_bits() -> None:
    values = spread(torch.randn(256, 512))
    for dim in (-1, -2):
        on_cpu, on_gpu = quantize(values, dim), quantize(values.cuda(), dim)  # type: ignore[arg-type]
        assert torch.equal(on_gpu.data.cpu().view(torch.uint8), on_cpu.data.view(torch.uint8))
        assert torch.equal(on_gpu.scales.cpu().view(torch.uint8), on_cpu.scales.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [TorchScaled, Emulation])
def test_packed_experts_on_the_gpu_equal_those_on_the_cpu(kind: type[GemmBackend]) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    reason = kind.why_not(device, "rceil")
    if reason is not None:
        pytest.skip(reason)
    sizes = torch.tensor([100, 0, 28, 200])
    weight, inputs = torch.randn(4, 256, 128), torch.randn(328, 128)
    expected = mxfp8_grouped_linear(inputs, weight, sizes.cumsum(0), operand_of(weight))
    operand = MXFP8Operand(weight=QuantizedNow(weight.to(device)), backend=kind())
    actual = mxfp8_grouped_linear(
        inputs.to(device, torch.bfloat16), weight.to(device), sizes.cumsum(0).to(device), operand
    )
    torch.testing.assert_close(actual.cpu().float(), expected, rtol=2**-6, atol=2**-4)
