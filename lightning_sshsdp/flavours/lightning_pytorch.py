"""The strategy and the callbacks for ``lightning.pytorch``."""

from typing import ClassVar

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ParallelStrategy

from lightning_sshsdp.family import FAMILIES, Family
from lightning_sshsdp.throughput import ThroughputMonitorMixin
from lightning_sshsdp.trainer import TrainerStrategyMixin
from lightning_sshsdp.weight_averaging import WeightAveragingMixin

__all__ = ["SSHSDPStrategy", "ThroughputMonitor", "WeightAveraging"]


class SSHSDPStrategy(TrainerStrategyMixin, ParallelStrategy):
    """The strategy ``"sshsdp"`` of ``lightning.pytorch.Trainer``, with its options."""

    family: ClassVar[Family] = FAMILIES[0]


class ThroughputMonitor(ThroughputMonitorMixin, Callback):
    """Logs tokens per second, MFU, memory and bytes moved, for ``lightning.pytorch.Trainer``."""

    family: ClassVar[Family] = FAMILIES[0]


class WeightAveraging(WeightAveragingMixin, Callback):
    """Averages weights on their shards (EMA, SWA), for ``lightning.pytorch.Trainer``."""
