"""The strategy for ``lightning.pytorch``."""

from typing import ClassVar

from lightning.pytorch.strategies import ParallelStrategy

from lightning_sshsdp.trainer import TrainerStrategyMixin
from lightning_sshsdp.family import FAMILIES, Family

__all__ = ["SSHSDPStrategy"]


class SSHSDPStrategy(TrainerStrategyMixin, ParallelStrategy):
    """Sharded data parallelism for ``lightning.pytorch.Trainer``, as ``strategy="sshsdp"`` or constructed."""

    family: ClassVar[Family] = FAMILIES[0]
