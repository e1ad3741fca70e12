"""What a user may choose: how weights are run, and how they are updated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from sshsdp.formats.dense import DenseFormat
from sshsdp.layout.optimization_units import Split
from sshsdp.packs import Pack

__all__ = ["RuntimePolicy", "UpdatePolicy"]


@dataclass(frozen=True, kw_only=True)
class RuntimePolicy:
    """How runtime parameters look and when they are gathered.

    Attributes:
        dtype: Compute dtype of gathered parameters. ``None`` keeps each parameter's own dtype.
        formats: Name pattern (``fnmatch`` glob over FQNs, ``*`` crosses dots) to runtime format;
            the first match wins, the rest takes ``DenseFormat(dtype)``. Non-floating parameters
            always keep their dtype.
        packs: Parameters that form one contiguous runtime tensor, see `sshsdp.Pack`.
        reshard_after_forward: Free gathered parameters after a unit's forward and gather them again
            in backward (less memory), or keep them (fewer bytes on the wire).
        prefetch: Number of units gathered ahead of the one that runs, in forward and in backward.
        cast_forward_inputs: Cast floating-point tensors that are given to the sharded model's own
            ``forward`` to ``dtype``. Tensors passed between its submodules are never cast.
    """

    dtype: torch.dtype | None = torch.bfloat16
    formats: Mapping[str, DenseFormat] = field(default_factory=dict)
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
            if not isinstance(runtime_format, DenseFormat):
                raise TypeError(
                    f"RuntimePolicy.formats[{pattern!r}] must be a runtime format such as "
                    f"sshsdp.DenseFormat(torch.float32), got {runtime_format!r}"
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
    """

    dtype: torch.dtype | None = torch.float32
    reduce_dtype: torch.dtype | None = torch.float32
    splits: Mapping[str, Split] = field(default_factory=dict)
    sharding: Literal["hierarchical", "replicated"] = "hierarchical"
    device: Literal["cpu"] | None = None

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
