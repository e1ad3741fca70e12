"""``LightningModule.load_from_checkpoint`` for checkpoint directories.

Lightning opens the path as a file, which is an ``IsADirectoryError`` for a sharded checkpoint. The
function that reads the file is replaced by one that reads such directories itself, and leaves
everything else to Lightning's. Only the model is read, not the optimizers.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["read_directories"]


def read_directories(saving: ModuleType) -> None:
    """Make a ``core.saving`` module of Lightning read checkpoint directories too. Idempotent."""
    original = saving.pl_load
    if getattr(original, "reads_directories", False):
        return

    @functools.wraps(original)
    def load(path_or_url: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(path_or_url, (str, Path)) and not Path(path_or_url).is_file():
            # Not before it is needed: this module is loaded along with torch.
            from lightning_sshsdp.sharded_files import read_metadata, read_whole_model
            from sshsdp import find_checkpoint

            path = find_checkpoint(path_or_url)
            if path.is_dir():
                metadata = read_metadata(path, kwargs.get("weights_only"))
                return {**metadata, "state_dict": read_whole_model(path)}
        return original(path_or_url, *args, **kwargs)

    load.reads_directories = True
    saving.pl_load = load
