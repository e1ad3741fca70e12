"""The strategy for ``pytorch_lightning``."""

from typing import ClassVar

from pytorch_lightning.strategies import ParallelStrategy

from lightning_sshsdp.trainer import TrainerStrategyMixin
from lightning_sshsdp.family import FAMILIES, Family

__all__ = ["SSHSDPStrategy"]


class SSHSDPStrategy(TrainerStrategyMixin, ParallelStrategy):
    """Sharded data parallelism for ``pytorch_lightning.Trainer``, as ``strategy="sshsdp"`` or constructed."""

    family: ClassVar[Family] = FAMILIES[1]
