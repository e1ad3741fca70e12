"""A callback that says how fast training runs and what the engine moves and holds.

Example:
    >>> from lightning_sshsdp import ThroughputMonitor  # doctest: +SKIP
    >>> Trainer(strategy="sshsdp", callbacks=ThroughputMonitor(), logger=logger)  # doctest: +SKIP
"""

from __future__ import annotations

import resource
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_sshsdp.environment import engine_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_sshsdp.family import Family

__all__ = [
    "ThroughputMonitorMixin",
    "count_tokens",
    "measure_peak_flops",
    "training_flops_per_token",
]


class ThroughputMonitorMixin:
    """Logs throughput, memory and communication of every logging interval.

    The values go to every logger of the Trainer: ``tokens_per_second`` (all ranks
    together), ``mfu``, ``step_seconds``, ``memory_gb`` (peak of this rank's device; of the process
    on CPU), and of the last step ``received_mb/<mesh axis>``, ``gathered_mb`` (peak of gathered
    runtime parameters), ``gradients_mb`` (peak of unsharded gradients) and ``copied_mb`` (gradients
    without a zero-copy rule, and publish).
    """

    family: Family

    def __init__(
        self,
        tokens_fn: Callable[[Any], int] | None = None,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        every_n_steps: int | None = None,
        prog_bar: bool = True,
        prefix: str = "throughput/",
    ) -> None:
        """Set the options.

        Args:
            tokens_fn: Tokens (or samples, or whatever is counted) in a batch. Default: elements of
                its ``input_ids``, or of its first integer tensor, else the rows of its first
                tensor.
            flops_per_token: Of forward and backward. Default: 6 for each weight of a matrix that is
                trained, 4 for each that is frozen; attention itself is not counted.
            peak_flops: Of one device, in flops per second. Default: what Lightning knows of the
                device, else the speed of a matrix product, measured at start.
            every_n_steps: Optimizer steps in an interval. Default: the Trainer's
                ``log_every_n_steps``.
            prog_bar: Show tokens per second and MFU in the progress bar.
            prefix: Before every name.
        """
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps must be positive, got {every_n_steps}")
        self._tokens_fn = tokens_fn or count_tokens
        self._flops_per_token = flops_per_token
        self._peak_flops = peak_flops
        self._every_n_steps = every_n_steps
        self._prog_bar = prog_bar
        self._prefix = prefix
        self._first_step = 0
        self._tokens = 0
        self._started = self._paused = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Find out what one device can do, and start counting."""
        if self._flops_per_token is None:
            self._flops_per_token = training_flops_per_token(pl_module)
        if self._peak_flops is None:
            self._peak_flops = self._find_peak_flops(trainer, pl_module)
        self._restart(trainer)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch."""
        self._tokens += self._tokens_fn(batch)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log at the end of an interval."""
        interval = self._every_n_steps or trainer.log_every_n_steps
        steps = trainer.global_step - self._first_step
        if steps < interval:
            return
        device = trainer.strategy.root_device
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        seconds = time.perf_counter() - self._started
        tokens = torch.tensor(float(self._tokens), dtype=torch.float64, device=device)
        tokens_per_second = float(trainer.strategy.reduce(tokens, reduce_op="sum")) / seconds
        assert self._flops_per_token is not None
        assert self._peak_flops is not None
        available = self._peak_flops * trainer.world_size
        speed = {
            "tokens_per_second": tokens_per_second,
            "mfu": tokens_per_second * self._flops_per_token / available,
        }
        if self._prog_bar:
            pl_module.log_dict(self._named(speed), prog_bar=True, logger=False, batch_size=1)
        rest = {"step_seconds": seconds / steps, "memory_gb": _peak_memory(device) / 1e9}
        metrics = self._named({**speed, **rest, **_moved_and_held(pl_module)})
        for logger in trainer.loggers:
            # Where Lightning logs what a step of this number logged itself.
            logger.log_metrics(metrics, step=trainer.global_step - 1)
        self._restart(trainer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Stop the clock."""
        self._paused = time.perf_counter()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Let the clock run on."""
        self._started += time.perf_counter() - self._paused

    def _restart(self, trainer: Any) -> None:
        self._first_step = trainer.global_step
        self._tokens = 0
        self._started = time.perf_counter()

    def _named(self, metrics: dict[str, float]) -> dict[str, float]:
        return {self._prefix + name: value for name, value in metrics.items()}

    def _find_peak_flops(self, trainer: Any, pl_module: nn.Module) -> float:
        device = trainer.strategy.root_device
        dtype = next((p.dtype for p in pl_module.parameters() if p.ndim > 1), torch.float32)
        known = self.family.fabric_name("utilities.throughput.get_available_flops")(device, dtype)
        return float(known) if known else measure_peak_flops(device, dtype)


def _moved_and_held(module: nn.Module) -> dict[str, float]:
    engine = engine_of(module)
    if engine is None:
        return {}
    stats = engine.stats
    axes = dict.fromkeys(kind.partition("/")[0] for kind in stats.wire.nbytes)
    return {
        **{f"received_mb/{axis}": stats.wire_bytes(axis) / 1e6 for axis in axes},
        "gathered_mb": stats.peak_gathered_bytes / 1e6,
        "gradients_mb": stats.peak_gradient_bytes / 1e6,
        "copied_mb": (stats.gradient_copy_bytes + stats.publish_bytes) / 1e6,
    }


def count_tokens(batch: Any) -> int:
    """Elements of ``input_ids`` or of the first integer tensor, else rows of the first tensor."""
    if hasattr(batch, "keys") and "input_ids" in batch:
        return int(batch["input_ids"].numel())
    tensors = _tensors(batch)
    for tensor in tensors:
        if not tensor.is_floating_point() and tensor.ndim > 1:
            return tensor.numel()
    return tensors[0].shape[0] if tensors and tensors[0].ndim else 1


def _tensors(batch: Any) -> list[torch.Tensor]:
    leaves = tree_leaves(batch)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def training_flops_per_token(model: nn.Module) -> float:
    """6 flops for each weight of a matrix that is trained, 4 for each that is frozen.

    Two each for forward, the gradient of the inputs and that of the weight. Tables that are only
    looked up take part in no matrix product.
    """
    # A dictionary, so that a tied weight counts once.
    multiplied = {
        parameter: None
        for module in model.modules()
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for parameter in module.parameters(recurse=False)
        if parameter.ndim > 1
    }
    return float(sum((6 if p.requires_grad else 4) * p.numel() for p in multiplied))


def measure_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Flops per second of the best square matrix product, of the first size that takes 20 ms."""
    size = 256
    while True:
        seconds = min(_seconds_of_product(device, dtype, size) for _ in range(3))
        if seconds > 0.02 or size >= 8192:
            return 2.0 * size**3 / seconds
        size *= 2


def _seconds_of_product(device: torch.device, dtype: torch.dtype, size: int) -> float:
    left = torch.ones(size, size, device=device, dtype=dtype)
    started = time.perf_counter()
    # Reading a value waits for the product on devices that run behind.
    (left @ left)[0, 0].item()
    return time.perf_counter() - started


def _peak_memory(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Kilobytes, but bytes on macOS.
    return float(peak) if sys.platform == "darwin" else peak * 1024.0
