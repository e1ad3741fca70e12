"""`save_pretrained`: safetensors files with an index, written while the model stays in shards.

What goes into which file is known from the shapes, so files are written one after another as the
address spaces are gathered, and rank 0 holds one file's tensors and one space.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from sshsdp.checkpoint.safetensors_files import INDEX_NAME, SINGLE_NAME
from sshsdp.checkpoint.state_entries import StateKind, state_entries
from sshsdp.checkpoint.store import checkpoint_directory
from sshsdp.comm.rendezvous import together

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sshsdp.engine.engine import Engine

__all__ = ["save_pretrained"]

_CALLER = "sshsdp.save_pretrained()"
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


def save_pretrained(
    engine: Engine,
    directory: str | Path,
    *,
    max_file_bytes: int = 5_000_000_000,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the model as ``cls.from_pretrained`` and `from_pretrained` read it. Collective.

    Masters under the model's own names, tied ones once; config and generation config if the model
    has them. The new files are in place once all of them are written, and until then the old ones
    are; other files of the directory stay.

    Args:
        engine: Of the model.
        directory: Where to; rank 0's counts.
        max_file_bytes: A file ends before it would exceed this, unless one tensor does.
        dtype: What floating-point parameters are converted to; None: they stay as the masters are.

    Raises:
        RuntimeError: A rank failed or did not call. What was there before is still there.
        ValueError: ``max_file_bytes`` is not positive, or the model has extra states, which
            safetensors files cannot hold.
    """
    plan = together(_CALLER, lambda: _plan(engine, max_file_bytes, dtype))
    with checkpoint_directory(_CALLER, directory, _keep_others) as folder:
        writer = _Writer(folder, plan) if dist.get_rank() == 0 else None
        failure: Exception | None = None
        for name, value in _values(engine):
            # The others gather on: a rank that stopped here would leave them waiting.
            if writer is not None and failure is None and name in plan.dtypes:
                try:
                    writer.add(name, value)
                except Exception as error:
                    failure = error
            del value
        if failure is not None:
            raise failure
        if writer is not None:
            writer.finish()
            _save_config(engine.model, folder, plan.config_dtype)


@dataclass
class _Plan:
    """Which tensors, as what, in which file (by its number)."""

    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    file_of: dict[str, int] = field(default_factory=dict)
    num_bytes: int = 0
    config_dtype: torch.dtype | None = None

    def file_name(self, number: int) -> str:
        total = max(self.file_of.values(), default=0) + 1
        return SINGLE_NAME if total == 1 else f"model-{number + 1:05d}-of-{total:05d}.safetensors"


def _plan(engine: Engine, max_file_bytes: int, dtype: torch.dtype | None) -> _Plan:
    engine._watch.check()
    if max_file_bytes <= 0:
        raise ValueError(f"{_CALLER}: max_file_bytes is {max_file_bytes}, it must be positive")
    plan = _Plan()
    ignored = set(getattr(engine.model, "_keys_to_ignore_on_save", None) or ())
    entries: list[tuple[str, tuple[int, ...], torch.dtype]] = []
    for space in engine.spaces:
        kept = space.update_dtype if dtype is None else dtype
        plan.config_dtype = plan.config_dtype or kept
        entries += [(slot.name, slot.shape, kept) for slot in space.slots]
    for name, module, attribute, kind in state_entries(engine.model):
        if kind is StateKind.EXTRA:
            raise ValueError(
                f"{_CALLER}: {name!r} is an extra state, which safetensors files cannot hold: use "
                "engine.save()"
            )
        if kind is StateKind.BUFFER:
            buffer: Any = module._buffers[attribute]
            entries.append((name, tuple(buffer.shape), buffer.dtype))
    number, filled = 0, 0
    for name, shape, kept in entries:
        if name in ignored:
            continue
        size = math.prod(shape) * kept.itemsize
        if filled and filled + size > max_file_bytes:
            number, filled = number + 1, 0
        filled += size
        plan.num_bytes += size
        plan.dtypes[name], plan.file_of[name] = kept, number
    return plan


def _values(engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then buffers, in the order of the plan. Collective."""
    for slot, value in engine.whole_parameters():
        yield slot.name, value
        del value
    for name, module, attribute, kind in state_entries(engine.model):
        if kind is StateKind.BUFFER:
            yield name, kind.read(module, attribute)


class _Writer:
    """Keeps the tensors of a file until the next file's first one comes."""

    def __init__(self, folder: Path, plan: _Plan) -> None:
        self._folder = folder
        self._plan = plan
        self._number = 0
        self._tensors: dict[str, torch.Tensor] = {}

    def add(self, name: str, value: torch.Tensor) -> None:
        if self._plan.file_of[name] != self._number:
            self._write()
            self._number += 1
        kept = value.detach().to("cpu", self._plan.dtypes[name], copy=True)
        self._tensors[name] = kept.contiguous()

    def finish(self) -> None:
        plan = self._plan
        self._write()
        if plan.file_name(0) == SINGLE_NAME:
            return
        index = {
            "metadata": {"total_size": plan.num_bytes},
            "weight_map": {name: plan.file_name(n) for name, n in sorted(plan.file_of.items())},
        }
        text = json.dumps(index, indent=2) + "\n"
        (self._folder / INDEX_NAME).write_text(text, encoding="utf-8")

    def _write(self) -> None:
        path = self._folder / self._plan.file_name(self._number)
        save_file(self._tensors, path, metadata={"format": "pt"})
        self._tensors = {}


def _save_config(model: Any, folder: Path, dtype: torch.dtype | None) -> None:
    if hasattr(getattr(model, "config", None), "save_pretrained"):
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.dtype = dtype
        config.save_pretrained(folder)
    if hasattr(getattr(model, "generation_config", None), "save_pretrained"):
        model.generation_config.save_pretrained(folder)


def _keep_others(old: Path, new: Path) -> None:
    """Have what else is in the old directory in the new one, without copying its bytes."""
    for entry in old.iterdir():
        target = new / entry.name
        if target.exists() or _WEIGHTS.fullmatch(entry.name):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, target, symlinks=True, copy_function=os.link)
        else:
            os.link(entry, target, follow_symlinks=False)
