"""The dense format: one element, one number of an ordinary dtype."""

from dataclasses import dataclass

import torch

__all__ = ["DenseFormat"]


@dataclass(frozen=True)
class DenseFormat:
    """Parameters stored as plain elements of ``dtype``.

    Attributes:
        dtype: fp32, bf16, fp16 or another floating-point dtype; ``None`` keeps a parameter's own.
    """

    dtype: torch.dtype | None = torch.bfloat16

    def runtime_dtype(self, parameter_dtype: torch.dtype) -> torch.dtype:
        """Dtype of a runtime parameter that was created with ``parameter_dtype``."""
        if self.dtype is None or not parameter_dtype.is_floating_point:
            return parameter_dtype
        return self.dtype
