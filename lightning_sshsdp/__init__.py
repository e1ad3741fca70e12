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
    from lightning_sshsdp.flavours.lightning_pytorch import (
        SSHSDPStrategy,
        ThroughputMonitor,
        WeightAveraging,
    )
    from lightning_sshsdp.gradient_norms import grad_norm

__all__ = [
    "FabricSSHSDPStrategy",
    "SSHSDPStrategy",
    "ThroughputMonitor",
    "WeightAveraging",
    "engine_of",
    "grad_norm",
]

# Where the public names are. The modules with a family's classes come in one kind for each family.
_ANY_FAMILY = {"engine_of": "environment", "grad_norm": "gradient_norms"}
_OF_FAMILY = {
    "SSHSDPStrategy": ("SSHSDPStrategy", ("lightning_pytorch", "pytorch_lightning")),
    "FabricSSHSDPStrategy": ("SSHSDPStrategy", ("lightning_fabric", "standalone_fabric")),
    "ThroughputMonitor": ("ThroughputMonitor", ("lightning_pytorch", "pytorch_lightning")),
    "WeightAveraging": ("WeightAveraging", ("lightning_pytorch", "pytorch_lightning")),
}

registration.install()


def __getattr__(name: str) -> Any:
    if name in _ANY_FAMILY:
        return getattr(import_module(f"lightning_sshsdp.{_ANY_FAMILY[name]}"), name)
    if name not in _OF_FAMILY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_sshsdp.family import FAMILIES, current_family

    attribute, modules = _OF_FAMILY[name]
    module = modules[FAMILIES.index(current_family())]
    return getattr(import_module(f"lightning_sshsdp.flavours.{module}"), attribute)
