"""What the checks that run on the workers share: train with a strategy, compare with DDP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.testing import assert_close

from tests.lightning.modules import make_trainer, token_loader

if TYPE_CHECKING:
    from collections.abc import Callable

    import lightning.pytorch as pl


def weights_of(trainer: pl.Trainer) -> dict[str, torch.Tensor]:
    """The module's whole state dict on every rank, after training with any strategy."""
    engine = getattr(trainer.strategy, "engine", None)
    if engine is not None:
        return engine.full_state_dict(rank0_only=False)
    state = trainer.lightning_module.state_dict()
    return {name: value.detach().clone() for name, value in state.items()}


def assert_same_weights(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rtol: float = 1e-5
) -> None:
    """Same names, same values up to rounding."""
    assert list(actual) == list(expected), (list(actual), list(expected))
    assert_close(actual, expected, rtol=rtol, atol=1e-6)


def assert_trains_like_ddp(
    make_module: Callable[[], pl.LightningModule],
    strategy: Any = "sshsdp",
    rtol: float = 1e-5,
    **options: Any,
) -> pl.Trainer:
    """Fit with DDP and with ``strategy``: losses and weights must agree. Returns the latter."""
    reference = make_module()
    ddp = make_trainer("ddp_find_unused_parameters_true", **options)
    ddp.fit(reference, token_loader(16))
    module = make_module()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer = make_trainer(strategy, **options)
    trainer.fit(module, token_loader(16))
    assert_close(module.losses, reference.losses, rtol=rtol, atol=1e-6)
    weights = weights_of(trainer)
    assert_same_weights(weights, weights_of(ddp), rtol)
    changed = [name for name, old in before.items() if not torch.equal(old, weights[name])]
    assert changed or not before, "nothing was trained"
    return trainer
