"""The strategy and the callbacks for ``pytorch_lightning``."""

from typing import ClassVar

from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies import ParallelStrategy

from lightning_sshsdp.family import FAMILIES, Family
from lightning_sshsdp.throughput import ThroughputMonitorMixin
from lightning_sshsdp.trainer import TrainerStrategyMixin
from lightning_sshsdp.weight_averaging import WeightAveragingMixin

__all__ = ["SSHSDPStrategy", "ThroughputMonitor", "WeightAveraging"]


class SSHSDPStrategy(TrainerStrategyMixin, ParallelStrategy):
    """The strategy ``"sshsdp"`` of ``pytorch_lightning.Trainer``, with its options."""

    family: ClassVar[Family] = FAMILIES[1]


class ThroughputMonitor(ThroughputMonitorMixin, Callback):
    """Logs tokens per second, MFU, memory and bytes moved, for ``pytorch_lightning.Trainer``."""

    family: ClassVar[Family] = FAMILIES[1]


class WeightAveraging(WeightAveragingMixin, Callback):
    """Averages weights on their shards (EMA, SWA), for ``pytorch_lightning.Trainer``."""
