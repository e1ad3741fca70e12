"""Strategy options: what a user writes in Python or YAML, turned into the engine's policies."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from sshsdp import DenseFormat, MXFP8Format, Pack, RuntimePolicy, UpdatePolicy, find_packs

__all__ = ["mesh_sizes", "runtime_policy", "update_policy"]

Policy = TypeVar("Policy", RuntimePolicy, UpdatePolicy)

# What autocast runs in fp32, or mixes with fp32 statistics, stays fp32 under "*-mixed".
_NORMS = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.modules.batchnorm._NormBase,
)

# Lightning's precision names to runtime, master and reduce dtype. None keeps the model's own dtype.
_DTYPES: dict[str, tuple[torch.dtype | None, torch.dtype | None, torch.dtype | None]] = {
    "32-true": (None, None, None),
    "64-true": (torch.float64, torch.float64, torch.float64),
    "bf16-true": (torch.bfloat16, torch.bfloat16, torch.float32),
    "16-true": (torch.float16, torch.float16, torch.float32),
    "bf16-mixed": (torch.bfloat16, torch.float32, torch.float32),
    "16-mixed": (torch.float16, torch.float32, torch.float32),
}

SUPPORTED_PRECISIONS = tuple(_DTYPES)


def runtime_policy(
    given: RuntimePolicy | Mapping[str, Any] | None,
    precision: str,
    model: nn.Module,
    *,
    quantizes: bool = False,
) -> RuntimePolicy:
    """The runtime policy for a model.

    Args:
        given: A policy is taken as it is. A mapping names some of its fields; the others follow
            from the precision.
        precision: Lightning's name for it, one of `SUPPORTED_PRECISIONS`.
        model: Decides which parameters belong to normalisation layers.
        quantizes: Linear layers are to be in MXFP8.

    Raises:
        ValueError: An unknown field, or a whole policy that does not quantize although it should.
    """
    if isinstance(given, RuntimePolicy):
        if quantizes and given.format is None:
            raise ValueError(
                "precision='mxfp8' and a runtime policy without it: write "
                "RuntimePolicy(format='mxfp8', ...), or give a mapping of the policy's fields"
            )
        return given
    fields = _parse_fields("runtime", given, RuntimePolicy)
    if fields.get("packs") == "auto":
        fields["packs"] = find_packs(model)
    if quantizes:
        fields.setdefault("format", "mxfp8")
    # The adapters cast batches themselves, or run under autocast: targets must not be rounded.
    fields.setdefault("cast_forward_inputs", False)
    if "dtype" not in fields:
        fields["dtype"] = _DTYPES[precision][0]
        if precision.endswith("-mixed"):
            norms = dict.fromkeys(_norm_parameters(model), DenseFormat(torch.float32))
            fields["formats"] = {**fields.get("formats", {}), **norms}
    return RuntimePolicy(**fields)


def update_policy(given: UpdatePolicy | Mapping[str, Any] | None, precision: str) -> UpdatePolicy:
    """The update policy; see `runtime_policy`."""
    if isinstance(given, UpdatePolicy):
        return given
    fields = _parse_fields("update", given, UpdatePolicy)
    fields.setdefault("dtype", _DTYPES[precision][1])
    fields.setdefault("reduce_dtype", _DTYPES[precision][2])
    return UpdatePolicy(**fields)


def mesh_sizes(
    replicate_size: int | str, shard_size: int | str, world_size: int, num_nodes: int
) -> tuple[int, int]:
    """``(replicate, shard)`` sizes whose product is the world size.

    ``"auto"`` for both: shard inside a node and replicate over nodes. One of them: the rest.

    Raises:
        ValueError: The sizes do not make up the world.
    """
    replicate = _size("replicate_size", replicate_size)
    shard = _size("shard_size", shard_size)
    if replicate is None and shard is None:
        replicate = num_nodes if world_size % num_nodes == 0 else 1
    if replicate is None:
        replicate = world_size // (shard or world_size)
    if shard is None:
        shard = world_size // replicate
    if replicate * shard != world_size:
        raise ValueError(
            f"replicate_size={replicate_size!r} and shard_size={shard_size!r} make "
            f"{replicate} x {shard} ranks, but there are {world_size}: their product must be the "
            "number of processes"
        )
    return replicate, shard


def _size(name: str, value: int | str) -> int | None:
    if value == "auto":
        return None
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be 'auto' or a positive integer, got {value!r}")
    return value


def _norm_parameters(model: nn.Module) -> list[str]:
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, _NORMS)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.is_floating_point()
    ]


def _parse_fields(
    option: str, given: Mapping[str, Any] | None, policy: type[Policy]
) -> dict[str, Any]:
    known = {field.name: field for field in dataclasses.fields(policy)}
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(
            f"{option} must be a sshsdp.{policy.__name__} or a mapping of its fields, got {given!r}"
        )
    fields: dict[str, Any] = {}
    for name, value in (given or {}).items():
        if name not in known:
            raise ValueError(
                f"{option}: unknown field {name!r}; {policy.__name__} has {', '.join(known)}"
            )
        if name == "formats":
            fields[name] = {pattern: _parse_format(item) for pattern, item in dict(value).items()}
        elif name == "packs" and value != "auto":
            fields[name] = tuple(_parse_pack(item) for item in value)
        else:
            fields[name] = _parse_dtype(value) if name.endswith("dtype") else value
    return fields


def _parse_dtype(value: Any) -> Any:
    """``"bfloat16"`` or ``"torch.bfloat16"`` to ``torch.bfloat16``."""
    if not isinstance(value, str):
        return value
    dtype = getattr(torch, value.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(
            f"{value!r} is no torch dtype; write it as in torch: 'bfloat16', 'float32'"
        )
    return dtype


def _parse_pack(value: Any) -> Any:
    """A list of names, or a mapping with ``names`` and ``fuse``, to a `sshsdp.Pack`."""
    if isinstance(value, Mapping):
        return Pack(**value)
    return Pack(tuple(value)) if isinstance(value, (list, tuple)) else value


def _parse_format(value: Any) -> Any:
    if value == "mxfp8":
        return MXFP8Format()
    dtype = _parse_dtype(value)
    return DenseFormat(dtype) if isinstance(dtype, torch.dtype) else value
