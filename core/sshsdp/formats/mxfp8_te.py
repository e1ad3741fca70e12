"""MXFP8 through Transformer Engine: its quantization kernels and GEMMs over our buffers.

Nothing here is imported before a GPU has been asked for, so the package is not needed elsewhere.

Not run on hardware yet: written against the published interface of Transformer Engine 2.12 to 2.18.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from sshsdp.formats.mxfp8_blocks import BLOCK, DATA_DTYPE, SCALE_DTYPE, BlockScaled
from sshsdp.formats.mxfp8_gemm import GemmBackend
from sshsdp.formats.mxfp8_scales import TILE_COLUMNS, TILE_ROWS
from sshsdp.formats.mxfp8_torch import TorchScaled

if TYPE_CHECKING:
    from types import ModuleType

    from sshsdp.formats.mxfp8_blocks import ScaleRounding

__all__ = ["TransformerEngine", "te_parameter"]

# The first with scales that come swizzled out of quantization.
_MIN_VERSION = (2, 12)


@functools.cache
def _import() -> ModuleType | str:
    """``transformer_engine.pytorch``, or why it cannot be had."""
    try:
        version: str = importlib.import_module("transformer_engine").__version__
        module = importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError) as error:
        return f"Transformer Engine cannot be imported ({error}); pip install 'sshsdp[te]'"
    if tuple(int(part) for part in version.split(".")[:2]) < _MIN_VERSION:
        return f"needs Transformer Engine 2.12 or newer, and {version} is installed"
    return module


def _te() -> Any:
    module = _import()
    assert not isinstance(module, str), module
    return module


class TransformerEngine(GemmBackend):
    """Quantization and products by Transformer Engine; grouped products by torch."""

    name = "te"
    reads_swizzled = True
    group_rows = TILE_ROWS

    @staticmethod
    def why_not(device: torch.device, rounding: ScaleRounding) -> str | None:
        """Needs Transformer Engine, a GPU that it has MXFP8 for, and ``rceil``."""
        if device.type != "cuda":
            return "needs an NVIDIA GPU"
        if rounding != "rceil":
            return f"quantizes with rounding='rceil' only, not {rounding!r}"
        module = _import()
        if isinstance(module, str):
            return module
        with torch.cuda.device(device):
            is_available, reason = module.is_mxfp8_available(return_reason=True)
        return None if is_available else str(reason)

    def quantize(
        self, values: torch.Tensor, rounding: ScaleRounding, *, rowwise: bool, columnwise: bool
    ) -> tuple[BlockScaled | None, BlockScaled | None]:
        """See `GemmBackend.quantize`. One kernel makes both orientations, scales in tiles."""
        te = _te()
        quantizer = te.MXFP8Quantizer(_e4m3(), rowwise=rowwise, columnwise=columnwise)
        quantizer.internal = True
        quantizer.optimize_for_gemm = True
        made = quantizer(values.contiguous())
        return (
            _from_te(made._rowwise_data, made._rowwise_scale_inv, made, -1) if rowwise else None,
            _from_te(made._columnwise_data, made._columnwise_scale_inv, made, -2)
            if columnwise
            else None,
        )

    def product(self, left: BlockScaled, right: BlockScaled, dtype: torch.dtype) -> torch.Tensor:
        """See `GemmBackend.product`."""
        return _gemm(left, right, out_dtype=dtype)

    def write_product(
        self, target: torch.Tensor, left: BlockScaled, right: BlockScaled, *, accumulate: bool
    ) -> None:
        """See `GemmBackend.write_product`. The GEMM adds to ``target`` itself."""
        if target.is_contiguous():
            _gemm(left, right, out_dtype=target.dtype, out=target, accumulate=accumulate)
        else:
            # A parameter that is stored transposed: the transposed product is contiguous.
            self.write_product(target.mT, right, left, accumulate=accumulate)

    def grouped_product(
        self, left: BlockScaled, right: BlockScaled, ends: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """See `GemmBackend.grouped_product`. By torch: TE wants the groups' sizes on the host."""
        return TorchScaled().grouped_product(left, right, ends, dtype)

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
        TorchScaled().write_grouped_product(target, left, right, ends, accumulate=accumulate)


def te_parameter(rowwise: BlockScaled, columnwise: BlockScaled, dtype: torch.dtype) -> torch.Tensor:
    """A weight for Transformer Engine's own modules, around gathered buffers: no copy.

    Args:
        rowwise: What forward reads.
        columnwise: What backward reads; its storage may be freed until then.
        dtype: What the tensor passes for.

    Raises:
        ValueError: Scales would have to be padded, and so copied: dims are no multiples of 128.
    """
    shape = tuple(rowwise.shape)
    if any(size % TILE_ROWS for size in shape) or not rowwise.data.is_contiguous():
        raise ValueError(
            f"Transformer Engine's modules read a weight of shape {shape} in place only if both "
            "dims are multiples of 128 and it is not stored transposed"
        )
    if rowwise.is_swizzled or columnwise.is_swizzled:
        raise ValueError("Transformer Engine's modules want scales that are not swizzled")
    tensor: torch.Tensor = _te().MXFP8Tensor(
        shape=shape,
        dtype=dtype,
        rowwise_data=rowwise.data.view(torch.uint8),
        rowwise_scale_inv=rowwise.scales.view(torch.uint8),
        columnwise_data=columnwise.data.view(torch.uint8),
        columnwise_scale_inv=columnwise.scales.view(torch.uint8),
        fp8_dtype=_e4m3(),
        quantizer=_te().MXFP8Quantizer(_e4m3(), rowwise=True, columnwise=True),
        with_gemm_swizzled_scales=False,
        requires_grad=True,
    )
    return tensor


def _e4m3() -> Any:
    return importlib.import_module("transformer_engine_torch").DType.kFloat8E4M3


def _from_te(data: torch.Tensor, scales: torch.Tensor, made: Any, dim: Any) -> BlockScaled:
    elements, padded = data.view(DATA_DTYPE), scales.view(SCALE_DTYPE)
    if made._with_gemm_swizzled_scales:
        return BlockScaled(elements, padded.reshape(-1), dim, is_swizzled=True)
    shape = [*elements.shape]
    shape[dim] //= BLOCK
    return BlockScaled(elements, padded[: shape[0], : shape[1]], dim)


def _to_te(blocks: BlockScaled) -> tuple[Any, bool]:
    """The matrix as Transformer Engine holds it, and whether that is rowwise."""
    is_rowwise = blocks.data.is_contiguous()
    stored = blocks if is_rowwise else blocks.mT
    data, scales = stored.data.view(torch.uint8), stored.scales.view(torch.uint8)
    tile = (TILE_ROWS, TILE_COLUMNS) if is_rowwise else (TILE_COLUMNS, TILE_ROWS)
    if not stored.is_swizzled:
        missing = [-size % multiple for size, multiple in zip(scales.shape, tile, strict=True)]
        if any(missing):
            scales = functional.pad(scales, (0, missing[1], 0, missing[0]))
        scales = scales.contiguous()
    else:
        shape = [*data.shape]
        shape[stored.dim] //= BLOCK
        padded = [size + -size % multiple for size, multiple in zip(shape, tile, strict=True)]
        scales = scales.view(padded)
    kind = "rowwise" if is_rowwise else "columnwise"
    other = "columnwise" if is_rowwise else "rowwise"
    storage = _te().MXFP8TensorStorage(
        fp8_dtype=_e4m3(),
        quantizer=None,
        with_gemm_swizzled_scales=stored.is_swizzled,
        **{
            f"{kind}_data": data,
            f"{kind}_scale_inv": scales,
            f"{other}_data": None,
            f"{other}_scale_inv": None,
        },
    )
    return storage, is_rowwise


def _gemm(left: BlockScaled, right: BlockScaled, **options: Any) -> torch.Tensor:
    """``left @ right.mT``: TE's first operand is ours on the right, in column-major thinking."""
    a, a_is_rowwise = _to_te(right)
    b, b_is_rowwise = _to_te(left)
    layout = ("T" if a_is_rowwise else "N") + ("N" if b_is_rowwise else "T")
    if layout == "TT":
        raise NotImplementedError("Transformer Engine has no product of this pair of layouts")
    gemms = importlib.import_module("transformer_engine.pytorch.cpp_extensions")
    product: torch.Tensor = gemms.general_gemm(a, b, layout=layout, **options)[0]
    return product
