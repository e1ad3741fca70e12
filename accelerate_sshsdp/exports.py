"""Whole models out of shards: state dicts, and ``save_pretrained`` of prepared models."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate_sshsdp.sharding import engine_of

if TYPE_CHECKING:
    import sshsdp

__all__ = ["ExportsMixin", "export_by_save_pretrained"]


class ExportsMixin:
    """The export methods of `Accelerator`; Accelerate's class comes after it in the bases."""

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """A model's state dict with whole tensors on the CPU. Collective.

        Args:
            model: Prepared or not.
            unwrap: As in Accelerate, for models that are not sharded.

        Returns:
            On the main process: master weights under the model's own names. Elsewhere: an empty
            dict.
        """
        engine = engine_of(model)
        if engine is None:
            return super().get_state_dict(model, unwrap=unwrap)
        return engine.full_state_dict()


def export_by_save_pretrained(model: nn.Module, engine: sshsdp.Engine) -> None:
    """Let a sharded model's ``save_pretrained`` gather what it saves.

    It becomes collective then, and only the main process writes. A ``state_dict`` that is passed to
    it is saved as it is.
    """
    original = getattr(model, "save_pretrained", None)
    if original is None:
        return

    @functools.wraps(original)
    def save_pretrained(save_directory: Any, *args: Any, **options: Any) -> None:
        state = options.get("state_dict")
        if state is None and not engine.is_closed:
            state = engine.full_state_dict()
            options |= {"state_dict": state, "is_main_process": dist.get_rank() == 0}
        # Noted now, because transformers takes out of the dict what it has written.
        dtypes = [value.dtype for value in (state or {}).values() if value.is_floating_point()]
        original(save_directory, *args, **options)
        if dtypes and options.get("is_main_process", True):
            _note_dtype(Path(save_directory), dtypes[0])

    model.__dict__["save_pretrained"] = save_pretrained


def _note_dtype(directory: Path, dtype: torch.dtype) -> None:
    """Have the configuration say what was saved: it knows of the runtime dtype only."""
    file = directory / "config.json"
    if not file.is_file():
        return
    config = json.loads(file.read_text(encoding="utf-8"))
    name = str(dtype).removeprefix("torch.")
    if "dtype" in config and config["dtype"] != name:
        config["dtype"] = name
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
