"""The two families of Lightning packages, which mirror each other with distinct classes.

``lightning`` brings ``lightning.pytorch`` and ``lightning.fabric``; the stand-alone distributions
bring ``pytorch_lightning`` and ``lightning_fabric``. A strategy must be built of the classes of the
family that runs it, so everything here that needs a Lightning name asks a `Family` for it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

__all__ = ["FAMILIES", "Family", "current_family"]


@dataclass(frozen=True)
class Family:
    """Import names of one family.

    Attributes:
        trainer: Package of the Trainer.
        fabric: Package of Fabric, which the Trainer's package uses.
    """

    trainer: str
    fabric: str

    def trainer_name(self, path: str) -> Any:
        """The object at ``path`` in the Trainer's package, such as ``"strategies.DDPStrategy"``."""
        return _resolve(self.trainer, path)

    def fabric_name(self, path: str) -> Any:
        """The object at ``path`` in Fabric's package."""
        return _resolve(self.fabric, path)


FAMILIES = (
    Family(trainer="lightning.pytorch", fabric="lightning.fabric"),
    Family(trainer="pytorch_lightning", fabric="lightning_fabric"),
)


def _resolve(package: str, path: str) -> Any:
    module, _, name = f"{package}.{path}".rpartition(".")
    return getattr(import_module(module), name)


def current_family() -> Family:
    """The family that this process uses: the imported one, else the installed one.

    Raises:
        ImportError: Neither is installed.
    """
    imported = [f for f in FAMILIES if f.trainer in sys.modules or f.fabric in sys.modules]
    if imported:
        return imported[0]
    for family in FAMILIES:
        if find_spec(family.trainer.partition(".")[0]) is not None:
            return family
    raise ImportError(
        "lightning_sshsdp needs Lightning: pip install 'sshsdp[lightning]', or pytorch-lightning"
    )
