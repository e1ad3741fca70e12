"""The strategy for ``lightning_fabric``."""

from typing import ClassVar

from lightning_fabric.strategies import ParallelStrategy

from lightning_sshsdp.fabric import FabricStrategyMixin
from lightning_sshsdp.family import FAMILIES, Family

__all__ = ["SSHSDPStrategy"]


class SSHSDPStrategy(FabricStrategyMixin, ParallelStrategy):
    """Sharded data parallelism for ``lightning_fabric.Fabric``, as ``strategy="sshsdp"`` or constructed."""

    family: ClassVar[Family] = FAMILIES[1]
