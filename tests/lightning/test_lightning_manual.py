"""Manual optimization with several optimizers: a small GAN, written in the ways that people do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from tests.lightning.comparing import assert_same_weights, weights_of
from tests.lightning.modules import make_trainer

if TYPE_CHECKING:
    from tests.lightning.conftest import Ranks


class _Gan(pl.LightningModule):
    def __init__(self, style: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.style = style
        torch.manual_seed(3)
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, noise = batch
        first, second = self.optimizers()
        getattr(self, f"_step_{self.style}")(
            first, lambda: -self.critic(self.generator(noise)).mean()
        )
        getattr(self, f"_step_{self.style}")(second, lambda: self._critic_loss(real, noise))

    def _critic_loss(self, real: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        fake = self.generator(noise).detach()
        return nn.functional.softplus(self.critic(fake) - self.critic(real)).mean()

    def _backward(self, loss: torch.Tensor) -> None:
        self.losses.append(loss.item())
        self.manual_backward(loss)

    def _step_plain(self, optimizer: Any, loss: Any) -> None:
        optimizer.zero_grad()
        self._backward(loss())
        optimizer.step()

    def _step_module_zero_grad(self, optimizer: Any, loss: Any) -> None:
        self.zero_grad()
        self._backward(loss())
        optimizer.step()

    def _step_toggled(self, optimizer: Any, loss: Any) -> None:
        self.toggle_optimizer(optimizer)
        self._backward(loss())
        others = self.critic if optimizer is self.optimizers()[0] else self.generator
        assert not any(p.requires_grad for p in others.parameters())
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)
        assert all(p.requires_grad for p in self.parameters())

    def _step_closure(self, optimizer: Any, loss: Any) -> None:
        def closure() -> None:
            optimizer.zero_grad()
            self._backward(loss())

        optimizer.step(closure=closure)

    def _step_accumulated(self, optimizer: Any, loss: Any) -> None:
        """Two backwards for one step; only the second one may reduce."""
        with optimizer.toggle_model(sync_grad=False):
            self._backward(loss() / 2)
        with optimizer.toggle_model(sync_grad=True):
            self._backward(loss() / 2)
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=0.01, betas=(0.5, 0.9)),
            torch.optim.SGD(self.critic.parameters(), lr=0.05, momentum=0.5),
        ]


def _train(strategy: str, style: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(
        torch.randn(24, 6, generator=generator), torch.randn(24, 4, generator=generator)
    )
    module = _Gan(style)
    trainer = make_trainer(strategy, max_epochs=2)
    trainer.fit(module, DataLoader(data, batch_size=2))
    assert trainer.global_step == 24
    return module.losses, weights_of(trainer)


@pytest.mark.parametrize(
    "style", ["plain", "module_zero_grad", "toggled", "closure", "accumulated"]
)
def test_gan_trains_like_ddp(two_ranks: Ranks, style: str) -> None:
    ddp = two_ranks.run(_train, "ddp_find_unused_parameters_true", style)
    ours = two_ranks.run(_train, "sshsdp", style)
    for (losses, weights), (expected, reference) in zip(ours, ddp, strict=True):
        assert_close(losses, expected, rtol=1e-5, atol=1e-6)
        assert_same_weights(weights, reference)
