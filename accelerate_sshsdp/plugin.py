"""`SSHSDPPlugin`: how `accelerate_sshsdp.Accelerator` shards.

Example:
    >>> from accelerate_sshsdp import Accelerator, SSHSDPPlugin  # doctest: +SKIP
    >>> plugin = SSHSDPPlugin(replicate_size=2, packs=True)  # doctest: +SKIP
    >>> accelerator = Accelerator(sshsdp_plugin=plugin, mixed_precision="bf16")  # doctest: +SKIP
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal

from accelerate_sshsdp.configuration import resolve
from accelerate_sshsdp.settings import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch import nn

__all__ = ["SSHSDPPlugin"]


@dataclass(kw_only=True)
class SSHSDPPlugin:
    """Options of SS-HSDP for `accelerate_sshsdp.Accelerator`.

    A field that is not given comes from its environment variable, else from the configuration file
    that ``accelerate launch`` was started with, else from its default.

    Args:
        units (``SSHSDP_UNITS``): What is gathered together: module classes, names of classes, name
            patterns (as a string, separated by commas), or a callable ``(name, module) -> bool``.
            Default (``"auto"``): the classes that a transformers model names in
            ``_no_split_modules``, or every child of every outermost ``nn.ModuleList``.
        replicate_size (``SSHSDP_REPLICATE_SIZE``): Size of the mesh's ``replicate`` axis (slow
            links). Default (``"auto"``): the number of machines, or what ``shard_size`` leaves.
        shard_size (``SSHSDP_SHARD_SIZE``): Size of the ``shard`` axis (fast links). Default
            (``"auto"``): the rest of the world.
        update_sharding (``SSHSDP_UPDATE_SHARDING``): ``"hierarchical"``: optimizer state is divided
            over all ranks. ``"replicated"`` (classic HSDP): over the ranks of a replica.
        reshard_after_forward (``SSHSDP_RESHARD_AFTER_FORWARD``): Free gathered parameters after a
            unit's forward (less memory) or keep them (fewer bytes on the wire). Default: True.
        prefetch (``SSHSDP_PREFETCH``): How many units are gathered ahead. Default: 1.
        packs (``SSHSDP_PACKS``): Run sibling projections (q/k/v, gate/up) as one matrix product.
            Default: False.
        runtime_dtype (``SSHSDP_RUNTIME_DTYPE``): Dtype of gathered parameters. Default
            (``"auto"``): that of the mixed precision, or each parameter's own without it.
        runtime_format (``SSHSDP_RUNTIME_FORMAT``): ``"mxfp8"``: the linear layers of the units are
            in MXFP8. ``Accelerator(mixed_precision="mxfp8")`` is the same, with bf16 for the rest.
            Default (``"auto"``): all in ``runtime_dtype``.
        update_dtype (``SSHSDP_UPDATE_DTYPE``): Dtype of the master weights. Default (``"auto"``):
            float32 under mixed precision, else the parameter's own.
        reduce_dtype (``SSHSDP_REDUCE_DTYPE``): Dtype in which gradients are summed over ranks.
            Default (``"auto"``): float32 under mixed precision, else the master's.
        formats (``SSHSDP_FORMATS``): Runtime dtypes by name pattern, the first match winning, such
            as ``{"*norm*": "float32"}`` or ``"*norm*=float32"``. Default: none.
        offload (``SSHSDP_OFFLOAD``): Keep master weights, reduced gradients and optimizer state on
            the host. Default: False.
        activation_checkpointing (``SSHSDP_ACTIVATION_CHECKPOINTING``): Recompute the units'
            activations in backward. Default: False.

    Raises:
        ValueError: A value means nothing; the message names the field and where it was given.
    """

    units: Sequence[type[nn.Module] | str] | Callable[[str, nn.Module], bool] | str | None = field(
        default=None,
        metadata={"help": "What is gathered together: classes, class names or name patterns."},
    )
    replicate_size: int | str | None = field(
        default=None, metadata={"help": "Size of the replicate axis, or 'auto'."}
    )
    shard_size: int | str | None = field(
        default=None, metadata={"help": "Size of the shard axis, or 'auto'."}
    )
    update_sharding: Literal["hierarchical", "replicated"] | None = field(
        default=None,
        metadata={"help": "Divide the optimizer state over all ranks, or over those of a replica."},
    )
    reshard_after_forward: bool | None = field(
        default=None, metadata={"help": "Free gathered parameters after forward."}
    )
    prefetch: int | None = field(
        default=None, metadata={"help": "How many units are gathered ahead."}
    )
    packs: bool | None = field(
        default=None, metadata={"help": "Run sibling projections as one matrix product."}
    )
    runtime_dtype: torch.dtype | str | None = field(
        default=None, metadata={"help": "Dtype of gathered parameters."}
    )
    runtime_format: Literal["mxfp8", "auto"] | None = field(
        default=None, metadata={"help": "Format of the units' linear layers, or 'auto'."}
    )
    update_dtype: torch.dtype | str | None = field(
        default=None, metadata={"help": "Dtype of the master weights."}
    )
    reduce_dtype: torch.dtype | str | None = field(
        default=None, metadata={"help": "Dtype in which gradients are summed."}
    )
    formats: Mapping[str, torch.dtype | str] | str | None = field(
        default=None, metadata={"help": "Runtime dtypes by name pattern."}
    )
    offload: bool | None = field(
        default=None, metadata={"help": "Keep master weights and optimizer state on the host."}
    )
    activation_checkpointing: bool | None = field(
        default=None, metadata={"help": "Recompute the units' activations in backward."}
    )

    def __post_init__(self) -> None:
        """Parse what was given and look up what was not."""
        for one in fields(self):
            given = getattr(self, one.name)
            value = (
                resolve(one.name) if given is None else parse(one.name, given, type(self).__name__)
            )
            setattr(self, one.name, value)

    def mesh_sizes(self, world_size: int) -> tuple[int, int]:
        """``(replicate, shard)`` sizes whose product is the world size.

        Raises:
            ValueError: The sizes do not make up the world.
        """
        replicate, shard = self.replicate_size, self.shard_size
        if replicate is None and shard is None:
            per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
            replicate = world_size // per_machine if world_size % per_machine == 0 else 1
        if replicate is None:
            assert isinstance(shard, int)
            replicate = max(world_size // shard, 1)
        assert isinstance(replicate, int)
        if shard is None:
            shard = max(world_size // replicate, 1)
        assert isinstance(shard, int)
        if replicate * shard != world_size:
            raise ValueError(
                f"replicate_size={self.replicate_size or 'auto'} and "
                f"shard_size={self.shard_size or 'auto'} make {replicate} x {shard} ranks, but "
                f"there are {world_size}: their product must be the number of processes"
            )
        return replicate, shard
