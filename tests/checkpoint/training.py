"""A small model with the shapes that checkpoints trip over, trained the same way everywhere."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sshsdp
from tests.support.training import OWN_DTYPES

WIDTH = 8
OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "plain sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2),
}


class Odd(nn.Module):
    """Uneven dims, one output row, a convolution, a buffer, a frozen layer, an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 5), nn.GELU(), nn.Linear(5, WIDTH)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 1)
        self.conv = nn.Conv1d(1, 3, 3)
        # Running statistics would depend on how the batch is split.
        self.norm = nn.BatchNorm1d(WIDTH).eval()
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.uses_all = True

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        if self.uses_all:
            hidden = hidden + self.sometimes(hidden)
        hidden = self.norm(hidden)
        return self.head(hidden).pow(2).mean() + self.conv(hidden[:, None]).pow(2).mean()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Weights with, vectors without decay."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1]},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def make_sshsdp(
    optimizer: str, mesh_shape: tuple[int, int] | None = None
) -> tuple[nn.Module, torch.optim.Optimizer, sshsdp.Engine]:
    """Model, attached optimizer and engine."""
    torch.manual_seed(0)
    model = Odd()
    mesh = mesh_shape and init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
    engine = sshsdp.shard(model, mesh=mesh, **OWN_DTYPES)
    attached = engine.attach(OPTIMIZERS[optimizer](groups_of(model)))
    return model, attached, engine


def make_fsdp2(optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same under FSDP2."""
    torch.manual_seed(0)
    model = Odd()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, OPTIMIZERS[optimizer](groups_of(model))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, start: int, stop: int) -> list[float]:
    """Steps ``[start, stop)`` on a global batch of four; the losses, averaged over ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in range(start, stop):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(4, 3, WIDTH, generator=generator)
        mine = batch[rank * 4 // size : (rank + 1) * 4 // size]
        loss = torch.stack([model(rows) for rows in mine]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    total = torch.stack(losses).double()
    dist.all_reduce(total)
    return (total / size).tolist()
