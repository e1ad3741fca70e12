"""Lightning for `sshsdp`: ``Trainer(strategy="sshsdp")`` and ``Fabric(strategy="sshsdp")``.

Importing this package registers the name ``"sshsdp"`` with every Lightning package; once it is
installed, that happens without an import as well (see `lightning_sshsdp.registration`). Importing
it is cheap: the strategies are loaded when they are used.

Example:
    >>> from lightning.pytorch import Trainer  # doctest: +SKIP
    >>> Trainer(strategy="sshsdp", devices=8, precision="bf16-mixed").fit(module)  # doctest: +SKIP
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_sshsdp import registration

if TYPE_CHECKING:
    from lightning_sshsdp.environment import engine_of
    from lightning_sshsdp.flavours.lightning_fabric import SSHSDPStrategy as FabricSSHSDPStrategy
    from lightning_sshsdp.flavours.lightning_pytorch import SSHSDPStrategy, ThroughputMonitor

__all__ = ["FabricSSHSDPStrategy", "SSHSDPStrategy", "ThroughputMonitor", "engine_of"]

# Public name: (name in its module, module for each family).
_LAZY = {
    "SSHSDPStrategy": ("SSHSDPStrategy", ("lightning_pytorch", "pytorch_lightning")),
    "FabricSSHSDPStrategy": ("SSHSDPStrategy", ("lightning_fabric", "standalone_fabric")),
    "ThroughputMonitor": ("ThroughputMonitor", ("lightning_pytorch", "pytorch_lightning")),
}

registration.install()


def __getattr__(name: str) -> Any:
    if name == "engine_of":
        from lightning_sshsdp.environment import engine_of

        return engine_of
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_sshsdp.family import FAMILIES, current_family

    attribute, modules = _LAZY[name]
    module = modules[FAMILIES.index(current_family())]
    return getattr(import_module(f"lightning_sshsdp.flavours.{module}"), attribute)
