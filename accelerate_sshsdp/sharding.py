"""From a plugin and a model to an engine."""

from __future__ import annotations

import functools
import logging
import re
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import sshsdp

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

    from accelerate_sshsdp.plugin import SSHSDPPlugin

__all__ = ["engine_of", "make_mesh", "shard_model"]

logger = logging.getLogger(__name__)

_ENGINE_ATTRIBUTE = "_sshsdp_engine"
_LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}


def engine_of(model: nn.Module) -> sshsdp.Engine | None:
    """The engine that shards a model, if an accelerator has prepared it."""
    engine: sshsdp.Engine | None = model.__dict__.get(_ENGINE_ATTRIBUTE)
    return None if engine is None or engine.is_closed else engine


def make_mesh(plugin: SSHSDPPlugin, device_type: str) -> DeviceMesh:
    """The mesh that the plugin asks for, over all ranks. Collective."""
    replicate, shard = plugin.mesh_sizes(dist.get_world_size())
    if replicate == 1:
        return init_device_mesh(device_type, (shard,), mesh_dim_names=("shard",))
    names = ("replicate", "shard")
    return init_device_mesh(device_type, (replicate, shard), mesh_dim_names=names)


def shard_model(
    model: nn.Module,
    plugin: SSHSDPPlugin,
    mesh: DeviceMesh,
    device: torch.device,
    mixed_precision: str,
) -> sshsdp.Engine:
    """Shard a model in place. Collective.

    Raises:
        RuntimeError: The model is compiled as a whole.
        ValueError: ``units`` or ``formats`` name nothing in the model.
    """
    if hasattr(model, "_orig_mod"):
        raise RuntimeError(
            "a compiled model hides from the engine where each unit begins and ends: prepare the "
            "plain model, and set Accelerator(dynamo_backend=...), which compiles its units, or "
            "compile them yourself, for example `for layer in model.model.layers: layer.compile()`"
        )
    units = _unit_rule(plugin, model)
    engine = sshsdp.shard(
        model,
        mesh,
        units,
        runtime=_runtime_policy(plugin, mixed_precision, model),
        update=_update_policy(plugin, mixed_precision),
        device=device,
    )
    model.__dict__[_ENGINE_ATTRIBUTE] = engine
    model.__dict__["_is_fsdp_managed_module"] = _KeepsStep(engine)
    if plugin.activation_checkpointing:
        _checkpoint_activations(model, engine)
    _report(model, engine)
    return engine


class _KeepsStep:
    """True if ranks must run a model equally often; transformers asks for it in ``generate``.

    The attribute under which it looks is the one that its own FSDP support sets.
    """

    def __init__(self, engine: sshsdp.Engine) -> None:
        self._engine = weakref.ref(engine)

    def __bool__(self) -> bool:
        engine = self._engine()
        return engine is not None and not engine.is_closed and not engine.is_unsharded

    def __deepcopy__(self, memo: dict[int, Any]) -> bool:
        return False

    def __reduce__(self) -> tuple[type[bool], tuple[()]]:
        return bool, ()


def _report(model: nn.Module, engine: sshsdp.Engine) -> None:
    if dist.get_rank() != 0:
        return
    trained = [slot for slot in engine.slots if slot.space.trainable]
    dtypes = dict.fromkeys(slot.space.update_dtype for slot in trained)
    logger.info(
        "%s: %d units, %d parameters of which %d are trained, master weights in %s",
        type(model).__name__,
        len(engine.units),
        len(engine.slots),
        len(trained),
        ", ".join(map(str, dtypes)) or "no dtype, as nothing is trained",
    )
    if len(engine.units) == 1:
        logger.warning(
            "%s has no units: all of its parameters are gathered at once, so only optimizer state "
            "is saved memory. Name the modules to gather together with units=[...]; it has %s",
            type(model).__name__,
            _class_names(model),
        )


# Units


def _unit_rule(plugin: SSHSDPPlugin, model: nn.Module) -> Any:
    wanted = plugin.units
    if wanted is None:
        # PEFT and other wrappers hand the attribute on.
        named = getattr(model, "_no_split_modules", None) or ()
        present = [name for name in named if _has(model, name)]
        return _by_classes(present) if present else None
    if callable(wanted):
        return wanted
    assert not isinstance(wanted, str)
    return [
        cls
        for one in wanted
        for cls in (_classes_named(model, one) if isinstance(one, str) else [one])
    ]


def _has(model: nn.Module, class_name: str) -> bool:
    return any(type(module).__name__ == class_name for module in model.modules())


def _by_classes(names: list[str]) -> Callable[[str, nn.Module], bool]:
    return lambda _, module: type(module).__name__ in names


def _classes_named(model: nn.Module, name: str) -> list[type[nn.Module] | str]:
    """The classes of that name in the model, or the name itself as a pattern."""
    classes = [type(module) for module in model.modules() if type(module).__name__ == name]
    if classes:
        return list(dict.fromkeys(classes))
    if name.isidentifier() and name[:1].isupper():
        raise ValueError(
            f"units: the model has no module of class {name!r}; it has {_class_names(model)}"
        )
    return [name]


def _class_names(model: nn.Module) -> str:
    return ", ".join(dict.fromkeys(type(module).__name__ for module in model.modules()))


# Policies


def _runtime_policy(
    plugin: SSHSDPPlugin, mixed_precision: str, model: nn.Module
) -> sshsdp.RuntimePolicy:
    dtype = plugin.runtime_dtype or _LOW_PRECISION.get(mixed_precision)
    assert dtype is None or isinstance(dtype, torch.dtype)
    assert isinstance(plugin.formats, dict)
    formats = {**plugin.formats, **_kept_in_fp32(model, dtype)}
    return sshsdp.RuntimePolicy(
        dtype=dtype,
        format="mxfp8" if plugin.runtime_format == "mxfp8" else None,
        formats={pattern: sshsdp.DenseFormat(kept) for pattern, kept in formats.items()},
        packs=sshsdp.find_packs(model) if plugin.packs else (),
        reshard_after_forward=bool(plugin.reshard_after_forward),
        prefetch=plugin.prefetch or 0,
        # Batches run under autocast, and targets must not be rounded.
        cast_forward_inputs=False,
    )


def _kept_in_fp32(model: nn.Module, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Parameters that a transformers model wants in fp32 whatever the others are in."""
    if dtype not in (torch.float16, torch.bfloat16):
        return {}
    names = list(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype is torch.float16:
        names += getattr(model, "_keep_in_fp32_modules", None) or ()
    if not names:
        return {}
    kept = re.compile(rf"(^|\.)({'|'.join(names)})($|\.)")
    first_name = {parameter: name for name, parameter in model.named_parameters()}
    # A tied parameter is kept under any of its names, and the engine knows it by the first.
    return {
        first_name[parameter]: torch.float32
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if kept.search(name)
    }


def _update_policy(plugin: SSHSDPPlugin, mixed_precision: str) -> sshsdp.UpdatePolicy:
    masters = torch.float32 if mixed_precision in _LOW_PRECISION else None
    update_dtype, reduce_dtype = plugin.update_dtype, plugin.reduce_dtype
    assert not isinstance(update_dtype, str) and not isinstance(reduce_dtype, str)
    assert plugin.update_sharding is not None
    return sshsdp.UpdatePolicy(
        dtype=update_dtype or masters,
        reduce_dtype=reduce_dtype or masters,
        sharding=plugin.update_sharding,
        device="cpu" if plugin.offload else None,
    )


# Activations


def _checkpoint_activations(model: nn.Module, engine: sshsdp.Engine) -> None:
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is not None and getattr(model, "supports_gradient_checkpointing", False):
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    for unit in engine.units:
        if not unit.is_root:
            unit.module.forward = functools.partial(
                checkpoint, unit.module.forward, use_reentrant=False
            )
