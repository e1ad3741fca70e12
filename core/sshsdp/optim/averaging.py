"""Averages of the masters over steps, kept on the shards."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


__all__ = ["ExponentialMovingAverage"]


class _Engine(Protocol):
    """What an average asks of an `sshsdp.Engine`."""

    @property
    def update_shards(self) -> list[torch.Tensor]: ...

    def after_load(self) -> None: ...

    def model_state_dict(self, shards: Sequence[torch.Tensor] | None = None) -> dict[str, Any]: ...


class ExponentialMovingAverage:
    """``average = decay * average + (1 - decay) * master`` after every `update`.

    Each rank averages its update shards: as much memory as the masters, no communication.

    Example:
        >>> average = ExponentialMovingAverage(engine, decay=0.999)  # doctest: +SKIP
        >>> optimizer.step(); average.update()  # doctest: +SKIP
        >>> with average.applied():  # doctest: +SKIP
        ...     evaluate(model)
    """

    def __init__(self, engine: _Engine, decay: float = 0.999) -> None:
        """Start from the present masters.

        Args:
            engine: With its optimizers attached: `attach` may rearrange shards.
            decay: Weight of the old average, from 0 to 1.

        Raises:
            ValueError: ``decay`` is outside of ``[0, 1]``.
        """
        if not 0 <= decay <= 1:
            raise ValueError(f"decay must be from 0 to 1, got {decay}")
        self.engine = engine
        self.decay = decay
        self._shards = engine.update_shards
        self._averages = [shard.clone() for shard in self._shards]

    @torch.no_grad()
    def update(self) -> None:
        """Take the masters in. Local.

        Raises:
            RuntimeError: An optimizer was attached since, and shards were rearranged.
        """
        present = self.engine.update_shards
        if any(old is not new for old, new in zip(self._shards, present, strict=True)):
            raise RuntimeError(
                "the engine's shards were rearranged: make the ExponentialMovingAverage after "
                "engine.attach()"
            )
        torch._foreach_lerp_(self._averages, self._shards, 1 - self.decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Run, or save, the model with the averages inside the context.

        Masters come back bit for bit. Training inside the context changes the averages.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for shard, average in zip(self._shards, self._averages, strict=True):
            kept = shard.clone()
            shard.copy_(average)
            average.copy_(kept)
        self.engine.after_load()

    def state_dict(self) -> dict[str, Any]:
        """The averages for ``dcp.save`` or ``dcp.load``, under the model's names. Local."""
        return self.engine.model_state_dict(self._averages)
