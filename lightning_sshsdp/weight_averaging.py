"""Averages of weights over training steps, kept on the shards: EMA, or the plain average of SWA.

Example:
    >>> from lightning_sshsdp import WeightAveraging  # doctest: +SKIP
    >>> Trainer(strategy="sshsdp", callbacks=WeightAveraging(decay=0.999))  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lightning_sshsdp.checkpoint import CURRENT_STATE

if TYPE_CHECKING:
    import sshsdp

__all__ = ["WeightAveragingMixin"]


class WeightAveragingMixin:
    """Averages the masters after optimizer steps; each rank averages what it holds.

    As Lightning's ``WeightAveraging`` does: validation during ``fit`` uses the averages,
    checkpoints hold them as the model's weights (and the current ones under
    ``current_model_state``), and they are the model's weights after training. Buffers are not
    averaged.
    """

    def __init__(
        self, decay: float | None = 0.999, every_n_steps: int = 1, start_step: int = 0
    ) -> None:
        """Set the options.

        Args:
            decay: Of an exponential moving average; None: all averaged steps weigh the same.
            every_n_steps: Optimizer steps between updates.
            start_step: Optimizer step (from 0) of the first update, which takes the weights as they
                are.

        Raises:
            ValueError: The decay is not between 0 and 1, or a number of steps is not positive.
        """
        if decay is not None and not 0 <= decay <= 1:
            raise ValueError(f"decay must be between 0 and 1, or None, got {decay}")
        if every_n_steps < 1 or start_step < 0:
            raise ValueError(
                f"every_n_steps must be positive and start_step not negative, got {every_n_steps} "
                f"and {start_step}"
            )
        self._decay = decay
        self._every_n_steps = every_n_steps
        self._start_step = start_step
        self._engine: sshsdp.Engine | None = None
        self._averages: list[torch.Tensor] = []
        self._num_averaged = 0
        self._latest_step = 0
        self._is_swapped = False
        self._is_resuming = False
        self._saved_current: dict[str, Any] | None = None

    # Training

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin anew, or where a checkpoint ended."""
        self._engine = trainer.strategy.engine
        self._averages = []
        if self._is_resuming and self._num_averaged:
            # The averages were loaded as the model's weights.
            self._averages = [shard.clone() for shard in self._engine.update_shards]
            trainer.strategy.load_current_state(self._saved_current)
            self._saved_current = None
        if not self._is_resuming:
            self._num_averaged = self._latest_step = 0
        self._is_resuming = False

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update the averages if an optimizer step asks for it."""
        step = trainer.global_step - 1
        if trainer.global_step <= self._latest_step or step < self._start_step:
            return
        if (step - self._start_step) % self._every_n_steps == 0:
            self._latest_step = trainer.global_step
            self._update(trainer.strategy.engine)

    @torch.no_grad()
    def _update(self, engine: sshsdp.Engine) -> None:
        if engine is not self._engine:
            raise RuntimeError(
                "the module was sharded anew (by a finetuning callback), the averages were not: "
                "use WeightAveraging in a fit of its own, after the last parameter is unfrozen"
            )
        if not self._num_averaged:
            self._averages = [shard.clone() for shard in engine.update_shards]
        else:
            weight = 1 / (self._num_averaged + 1) if self._decay is None else 1 - self._decay
            torch._foreach_lerp_(self._averages, engine.update_shards, weight)
        self._num_averaged += 1

    @torch.no_grad()
    def _swap(self) -> None:
        assert self._engine is not None
        for shard, average in zip(self._engine.update_shards, self._averages, strict=True):
            kept = shard.clone()
            shard.copy_(average)
            average.copy_(kept)
        self._engine.after_load()

    # Evaluation, and the end

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Validate the averages."""
        if self._averages:
            self._swap()
            self._is_swapped = True

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Go on with the current weights."""
        if self._is_swapped:
            self._swap()
            self._is_swapped = False

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the averages in the model."""
        if self._averages:
            self._swap()
            self._averages = []

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """How many steps were averaged."""
        return {"num_averaged": self._num_averaged, "latest_step": self._latest_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the counts; the averages themselves come with the model."""
        self._num_averaged = state_dict["num_averaged"]
        self._latest_step = state_dict["latest_step"]
        self._is_resuming = True

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Have the averages saved as the model's weights, and the current ones beside them."""
        if not self._averages:
            return
        shown = checkpoint["state_dict"]
        other = trainer.strategy.state_of_shards(self._averages)
        current, averages = (other, shown) if self._is_swapped else (shown, other)
        checkpoint["state_dict"], checkpoint[CURRENT_STATE] = averages, current

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Keep the current weights of a full checkpoint until the module is sharded."""
        self._saved_current = checkpoint.get(CURRENT_STATE)
