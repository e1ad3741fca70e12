"""Lightning strategies for `sshsdp`: ``Trainer(strategy="sshsdp")`` and ``Fabric(strategy="sshsdp")``.

Importing this package registers the name ``"sshsdp"`` with every Lightning package; once it is
installed, that happens without an import as well (see `lightning_sshsdp.registration`). Importing it
is cheap: the strategies are loaded when they are used.

Example:
    >>> from lightning.pytorch import Trainer  # doctest: +SKIP
    >>> Trainer(strategy="sshsdp", devices=8, precision="bf16-mixed").fit(module)  # doctest: +SKIP
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lightning_sshsdp import registration

__all__ = ["FabricSSHSDPStrategy", "SSHSDPStrategy"]

registration.install()


def __getattr__(name: str) -> Any:
    if name in ("SSHSDPStrategy", "FabricSSHSDPStrategy"):
        from lightning_sshsdp.family import FAMILIES, current_family

        flavours = {
            "SSHSDPStrategy": ("lightning_pytorch", "pytorch_lightning"),
            "FabricSSHSDPStrategy": ("lightning_fabric", "standalone_fabric"),
        }
        flavour = flavours[name][FAMILIES.index(current_family())]
        return import_module(f"lightning_sshsdp.flavours.{flavour}").SSHSDPStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
