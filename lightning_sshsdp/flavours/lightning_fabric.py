"""The strategy for ``lightning.fabric``."""

from typing import ClassVar

from lightning.fabric.strategies import ParallelStrategy

from lightning_sshsdp.fabric import FabricStrategyMixin
from lightning_sshsdp.family import FAMILIES, Family

__all__ = ["SSHSDPStrategy"]


class SSHSDPStrategy(FabricStrategyMixin, ParallelStrategy):
    """The strategy ``"sshsdp"`` of ``lightning.fabric.Fabric``, with its options."""

    family: ClassVar[Family] = FAMILIES[0]
