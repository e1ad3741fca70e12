"""`from_pretrained`: transformers' models out of safetensors files, of which a rank reads its part.

::

    config --> model on meta --> engine without values
                    |                     |
    files' headers --> which tensor of which file is which parameter (checked before any is read)
                                          |
                 each rank: its slices of the mapped files --> masters --> publish

Note: no parameter is ever whole on a rank, except one that no file has: rank 0 initialises it as
transformers does, and the others take their part.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from sshsdp.assembly.materialize import initial_value
from sshsdp.checkpoint.chunks import ChunkedTensor
from sshsdp.checkpoint.model_state import listed
from sshsdp.checkpoint.safetensors_files import SafetensorsFiles
from sshsdp.comm.rendezvous import together
from sshsdp.comm.topology import resolve_mesh
from sshsdp.engine.build import shard_without_values

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from sshsdp.assembly.discovery import UnitRule
    from sshsdp.engine.engine import Engine
    from sshsdp.policies import RuntimePolicy, UpdatePolicy

__all__ = ["from_pretrained"]

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound="nn.Module")

_CALLER = "sshsdp.from_pretrained()"


def from_pretrained(
    cls: type[Model],
    directory: str | Path,
    *,
    mesh: DeviceMesh | None = None,
    units: UnitRule = None,
    runtime: RuntimePolicy | None = None,
    update: UpdatePolicy | None = None,
    device: torch.device | str | None = None,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Model, Engine]:
    """Load a transformers model into shards. Collective.

    A rank holds its shards and at most one tensor's part, or one tensor that no file has.
    Values are converted to the masters' dtype as they are read. Missing and unexpected keys are
    logged as a warning on rank 0. The model is in evaluation mode, as transformers leaves it.

    Args:
        cls: A model class of transformers, or an auto class.
        directory: With ``config.json`` and ``model.safetensors``, or
            ``model.safetensors.index.json`` and its files.
        mesh: As in `shard`.
        units: As in `shard`.
        runtime: As in `shard`.
        update: As in `shard`.
        device: As in `shard`.
        config: Instead of the directory's own.
        **kwargs: For the model's construction, such as ``attn_implementation`` or ``dtype`` (what
            dtypes of a policy are that are None; default: the config's).

    Returns:
        The model and its engine.

    Raises:
        FileNotFoundError: The directory or a file is not there.
        ValueError: A tensor has another shape than the parameter, or the checkpoint needs a
            conversion: use ``cls.from_pretrained`` and `shard` for it.
        RuntimeError: No process group; another rank failed or did not call.
    """
    mesh = resolve_mesh(mesh, None if device is None else torch.device(device))

    def prepare() -> tuple[Model, SafetensorsFiles, dict[str, str]]:
        files = SafetensorsFiles.find(directory)
        model = _on_meta(cls, directory, config, kwargs)
        return model, files, _match(model, files)

    model, files, sources = together(_CALLER, prepare)
    engine = shard_without_values(model, mesh, units, runtime, update, device=device)
    state = engine.model_state_dict()
    read: set[int] = set()
    with torch.no_grad():
        for name, target in state.items():
            if name in sources and id(target) not in read:
                read.add(id(target))
                files.read(sources[name], target)
        _initialize(engine, state, read)
    engine.after_load()
    return model.eval(), engine


def _on_meta(
    cls: type[Model], directory: str | Path, config: Any, kwargs: Mapping[str, Any]
) -> Model:
    from transformers import AutoConfig, GenerationConfig

    if config is None:
        config = AutoConfig.from_pretrained(directory)
    build: Any = getattr(cls, "from_config", None) or cls._from_config  # type: ignore[attr-defined]
    with torch.device("meta"):
        model = build(config, **kwargs)
    if model.can_generate():
        try:
            model.generation_config = GenerationConfig.from_pretrained(directory)
        except OSError:
            logger.debug("%s has no generation config", directory)
    found: Model = model
    return found


def _match(model: nn.Module, files: SafetensorsFiles) -> dict[str, str]:
    """``{name in the model: key in the files}``; logs what differs on rank 0."""
    state = model.state_dict(keep_vars=True)
    found = _names(files.shapes, model, state)
    sources = {name: key for name, key in found.items() if name in state}
    problems = [
        f"{name!r} has shape {tuple(state[name].shape)} in the model and {files.shapes[key]} in "
        f"{files.place(key)}"
        for name, key in sources.items()
        if tuple(state[name].shape) != files.shapes[key]
    ]
    if problems:
        raise ValueError(f"{_CALLER}: " + "; ".join(problems))
    filled = {id(state[name]) for name in sources}
    differing: Any = SimpleNamespace(
        missing_keys={name for name, value in state.items() if id(value) not in filled},
        unexpected_keys={key for name, key in found.items() if name not in state},
    )
    # What transformers knows to be harmless, such as buffers of old versions.
    model._adjust_missing_and_unexpected_keys(differing)  # type: ignore[operator]
    if dist.get_rank() == 0:
        if missing := sorted(differing.missing_keys):
            logger.warning("missing in %s, newly initialised: %s", files.directory, listed(missing))
        if unexpected := sorted(differing.unexpected_keys):
            logger.warning("unexpected in %s, not used: %s", files.directory, listed(unexpected))
    return sources


def _names(keys: Iterable[str], model: Any, state: dict[str, Any]) -> dict[str, str]:
    """What transformers calls the keys of files, by name: old names, prefixes of base models."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    transforms: Any = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if not isinstance(one, WeightRenaming)]
    names: dict[str, str] = {}
    for key in keys:
        name, pattern = rename_source_key(
            key, renamings, converters, model.base_model_prefix, state
        )
        if pattern is not None:
            kind = type(model).__name__
            raise ValueError(
                f"{_CALLER}: {key!r} must be converted to become {name!r}, or a part of it: load "
                f"with {kind}.from_pretrained() and call sshsdp.shard(model)"
            )
        names[name] = key
    return names


def _initialize(engine: Engine, state: Mapping[str, Any], read: set[int]) -> None:
    """Give the parameters that no file has the values of rank 0's initialisation."""
    topology = engine.topology
    for slot in [slot for space in engine.spaces for slot in space.slots]:
        target = state[slot.name]
        if id(target) in read:
            continue
        value = initial_value(engine.model, slot, topology.device).contiguous()
        topology.world.broadcast(value, slot.name)
        if not isinstance(target, ChunkedTensor):
            continue
        for offsets, chunk in target.chunks():
            chunk.copy_(value[_index(offsets, chunk)])


def _index(offsets: tuple[int, ...], chunk: torch.Tensor) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(offsets, chunk.shape, strict=True))
