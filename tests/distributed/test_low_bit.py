"""torchao's low-bit optimizers, unmodified: the same blocks and the same bits as on one process."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sshsdp
from tests.support.compare import assert_within, relative_error
from tests.support.subject import seeded
from tests.support.training import OWN_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# These optimizers compute in float32, from gradients in float64: sums in another order hardly ever
# change what they see.
TOLERANCE = 1e-7

CLASSES = ["AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit"]


class Mixed(nn.Module):
    """Matrices that are quantized, one whose size no block divides, and small vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(70, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 80), nn.Tanh(), nn.Linear(80, 64))
            for _ in range(2)
        )
        self.odd = nn.Linear(64, 67)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.odd(x)


def build() -> nn.Module:
    with seeded(5):
        return Mixed().double()


def make(model: nn.Module, name: str) -> torch.optim.Optimizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchao.optim
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return getattr(torchao.optim, name)(groups, lr=1e-2)


def step(model: nn.Module, index: int, rank: int) -> None:
    tokens = torch.randint(70, (2, 5), generator=torch.Generator().manual_seed(10 * index + rank))
    model(tokens).square().mean().backward()


def train_plain(name: str, mesh: tuple[int, int], steps: int) -> dict[str, torch.Tensor]:
    """One process; gradients are added up as the mesh does, so that codes round alike."""
    model = build()
    optimizer = make(model, name)
    with torch.compiler.set_stance("force_eager"):
        for index in range(steps):
            totals: list[list[torch.Tensor]] = []
            for row in torch.arange(mesh[0] * mesh[1]).view(mesh).tolist():
                for rank in row:
                    step(model, index, rank)
                totals.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
                model.zero_grad()
            for parameter, *sums in zip(model.parameters(), *totals, strict=True):
                parameter.grad = sum(sums) / (mesh[0] * mesh[1])
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}


def shard(name: str, mesh: tuple[int, int]) -> tuple[nn.Module, sshsdp.Engine, Any]:
    model = build()
    device_mesh = dist.init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    engine = sshsdp.shard(model, device_mesh, **OWN_DTYPES)
    return model, engine, engine.attach(make(model, name))


def advance(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    with torch.compiler.set_stance("force_eager"):
        for index in steps:
            step(model, index, dist.get_rank())
            optimizer.step()
            optimizer.zero_grad()


def train_sharded(name: str, mesh: tuple[int, int], steps: int) -> tuple[dict[str, Any], int]:
    """Whole weights on rank 0; bytes of this rank's quantized state."""
    model, engine, optimizer = shard(name, mesh)
    advance(model, optimizer, range(steps))
    codes = [
        value.codes.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if hasattr(value, "codes")
    ]
    return engine.full_state_dict(), sum(codes)


@pytest.mark.parametrize("mesh", [(1, 4), (2, 2)], ids=str)
@pytest.mark.parametrize("name", CLASSES)
def test_low_bit_training_equals_torchao_on_one_process(
    workers: Callable[[int], Any], name: str, mesh: tuple[int, int]
) -> None:
    expected = train_plain(name, mesh, 20)
    results = workers(4).run(train_sharded, name, mesh, 20)
    for key, value in expected.items():
        assert_within(relative_error(results[0][0][key], value), TOLERANCE, key)
    assert sum(nbytes for _, nbytes in results) > 0


def quantized_elements(mesh: tuple[int, int]) -> tuple[int, int]:
    _, engine, optimizer = shard("AdamW8bit", mesh)
    advance(engine.model, optimizer, range(1))
    states = [state["exp_avg"] for state in optimizer.state.values()]
    quantized = sum(s.codes.numel() for s in states if hasattr(s, "codes"))
    return quantized, sum(s.numel() for s in states) - quantized


@pytest.mark.parametrize("mesh", [(1, 4), (2, 2)], ids=str)
def test_what_is_quantized_is_decided_by_the_whole_parameter(
    workers: Callable[[int], Any], mesh: tuple[int, int]
) -> None:
    """Pieces have fewer than torchao's least number of elements, and are quantized all the same."""
    wanted = sum(
        p.numel() for p in build().parameters() if p.numel() >= 4096 and p.numel() % 256 == 0
    )
    found = workers(4).run(quantized_elements, mesh)
    padding = 2 * 256 * 4
    assert wanted <= sum(quantized for quantized, _ in found) <= wanted + padding


def save_and_resume(name: str, path: str) -> float:
    """Largest difference between going on and loading, in weights after the next steps."""
    model, engine, optimizer = shard(name, (1, dist.get_world_size()))
    advance(model, optimizer, range(3))
    engine.save(path, optimizer)
    whole = engine.full_optimizer_state_dict(optimizer)
    advance(model, optimizer, range(3, 6))
    straight = engine.full_state_dict(rank0_only=False)
    worst = 0.0
    for from_file in (True, False):
        other, other_engine, other_optimizer = shard(name, (dist.get_world_size(), 1))
        other_engine.load(path, other_optimizer)
        if not from_file:
            other_engine.load_full_optimizer_state_dict(other_optimizer, whole)
        kept = [
            v for s in other_optimizer.state.values() for v in s.values() if hasattr(v, "codes")
        ]
        assert kept
        advance(other, other_optimizer, range(3, 6))
        resumed = other_engine.full_state_dict(rank0_only=False)
        worst = max(worst, *(relative_error(resumed[n], v) for n, v in straight.items()))
    return worst


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_a_checkpoint_keeps_low_bit_state_for_another_mesh(
    workers: Callable[[int], Any], tmp_path: Path, name: str
) -> None:
    assert_within(max(workers(2).run(save_and_resume, name, str(tmp_path / "saved"))), TOLERANCE)


def attach_one_by_one() -> None:
    import torchao.optim

    model = build()
    engine = sshsdp.shard(model)
    vectors = [p for p in model.parameters() if p.ndim < 2]
    engine.attach(torch.optim.AdamW(vectors))
    matrices = [p for p in model.parameters() if p.ndim > 1]
    engine.attach(torchao.optim.AdamW8bit(matrices))


def test_blocks_that_cannot_be_aligned_any_more_are_told(workers: Callable[[int], Any]) -> None:
    with pytest.raises(AssertionError, match=r"attach all optimizers in one call"):
        workers(2).run(attach_one_by_one)
