"""What a user may choose: how weights are run, and how they are updated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from sshsdp.formats.dense import DenseFormat
from sshsdp.formats.mxfp8 import COMPUTE_DTYPES, MXFP8Format
from sshsdp.layout.optimization_units import Split
from sshsdp.packs import Pack

__all__ = ["RuntimePolicy", "UpdatePolicy"]


@dataclass(frozen=True, kw_only=True)
class RuntimePolicy:
    """How runtime parameters look and when they are gathered.

    Attributes:
        dtype: Compute dtype of gathered parameters. ``None`` keeps each parameter's own dtype.
        format: ``"mxfp8"``, or an `sshsdp.MXFP8Format`: linear layers of the repeated blocks are in
            MXFP8 (plain ``nn.Linear`` weights and packed experts, in every unit but the root, whose
            last two dims are multiples of 32; routers stay dense). The log says which.
        formats: Name pattern (``fnmatch`` glob over FQNs, ``*`` crosses dots) to runtime format;
            the first match wins, the rest takes ``format`` where that applies, else
            ``DenseFormat(dtype)``. Non-floating parameters always keep their dtype.
        packs: Parameters that form one contiguous runtime tensor, see `sshsdp.Pack`.
        reshard_after_forward: Free gathered parameters after a unit's forward and gather them again
            in backward (less memory), or keep them (fewer bytes on the wire).
        prefetch: Number of units gathered ahead of the one that runs, in forward and in backward.
        cast_forward_inputs: Cast floating-point tensors that are given to the sharded model's own
            ``forward`` to ``dtype``. Tensors passed between its submodules are never cast.
    """

    dtype: torch.dtype | None = torch.bfloat16
    format: MXFP8Format | Literal["mxfp8"] | None = None
    formats: Mapping[str, DenseFormat | MXFP8Format] = field(default_factory=dict)
    packs: Sequence[Pack] = ()
    reshard_after_forward: bool = True
    prefetch: int = 1
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise ValueError(
                f"RuntimePolicy.dtype must be a floating-point dtype, got {self.dtype}"
            )
        if self.prefetch < 0:
            raise ValueError(f"RuntimePolicy.prefetch must be 0 or more, got {self.prefetch}")
        for pattern, runtime_format in self.formats.items():
            if not isinstance(runtime_format, (DenseFormat, MXFP8Format)):
                raise TypeError(
                    f"RuntimePolicy.formats[{pattern!r}] must be a runtime format such as "
                    "sshsdp.DenseFormat(torch.float32) or sshsdp.MXFP8Format(), got "
                    f"{runtime_format!r}"
                )
        if self.format == "mxfp8":
            object.__setattr__(self, "format", MXFP8Format())
        if self.format is not None and not isinstance(self.format, MXFP8Format):
            raise ValueError(
                "RuntimePolicy.format must be None, 'mxfp8' or an sshsdp.MXFP8Format, got "
                f"{self.format!r}; dense formats are chosen by dtype"
            )
        if self.format is not None and self.dtype not in (None, *COMPUTE_DTYPES):
            raise ValueError(
                "RuntimePolicy(format='mxfp8') computes in bfloat16, float32 or float64, got "
                f"dtype={self.dtype}"
            )


@dataclass(frozen=True, kw_only=True)
class UpdatePolicy:
    """How update parameters are kept and how gradients reach them.

    Attributes:
        dtype: Master dtype of trainable parameters. ``None`` keeps each parameter's runtime dtype.
        reduce_dtype: Dtype in which gradients are summed over ranks. ``None`` takes the master
            dtype. Gradients are averaged: divided by the number of ranks.
        splits: Name pattern (globs as in ``RuntimePolicy.formats``, the first match wins) to
            `sshsdp.Split`: how a parameter that holds several matrices is cut into the units that
            matrix optimizers work on. The rest is cut as its structure tells: experts apart, known
            fused projections into their parts, convolutions seen as matrices. Elementwise
            optimizers and checkpoints know nothing of it.
        sharding: On a 2-D mesh, ``"hierarchical"`` divides optimizer state over all R * S ranks,
            ``"replicated"`` (classic HSDP) over the S ranks of the ``shard`` axis only.
        device: ``"cpu"`` keeps masters, reduced gradients and optimizer state on the host:
            gradients go down and published values come up, through pinned memory. ``None``: where
            the runtime parameters are.
        skip_nonfinite_steps: An optimizer step for which some gradient on some rank is inf or NaN
            leaves weights and optimizer state as they are. Costs one number over all ranks and a
            wait for it in every step.
    """

    dtype: torch.dtype | None = torch.float32
    reduce_dtype: torch.dtype | None = torch.float32
    splits: Mapping[str, Split] = field(default_factory=dict)
    sharding: Literal["hierarchical", "replicated"] = "hierarchical"
    device: Literal["cpu"] | None = None
    skip_nonfinite_steps: bool = False

    def __post_init__(self) -> None:
        for name in ("dtype", "reduce_dtype"):
            value = getattr(self, name)
            if value is not None and not value.is_floating_point:
                raise ValueError(f"UpdatePolicy.{name} must be a floating-point dtype, got {value}")
        for pattern, split in self.splits.items():
            if not isinstance(split, Split):
                raise TypeError(
                    f"UpdatePolicy.splits[{pattern!r}] must be a sshsdp.Split such as "
                    f"sshsdp.Split.equal(2), got {split!r}"
                )
        if self.sharding not in ("hierarchical", "replicated"):
            raise ValueError(
                "UpdatePolicy.sharding must be 'hierarchical' or 'replicated', "
                f"got {self.sharding!r}"
            )
        if self.device not in (None, "cpu"):
            raise ValueError(f"UpdatePolicy.device must be None or 'cpu', got {self.device!r}")
