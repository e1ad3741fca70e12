"""Ways to call a model that broke other engines, against the same calls of plain torch."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import sshsdp
from tests.support.compare import ROUNDING, assert_within, relative_error
from tests.support.subject import seeded
from tests.support.training import OWN_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("double")

WIDTH = 8


class Block(nn.Module):
    """A unit that holds a unit, and recomputes it."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recomputes:
            return x + self.scale * torch.tanh(checkpoint(self.inner, x, use_reentrant=False))
        return x + self.scale * torch.tanh(self.inner(x))


class Stack(nn.Module):
    """Blocks and a head, all of it recomputed in backward or nothing."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(recomputes) for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def data(step: int, rank: int, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def two_losses_of_one_output(model: nn.Module, step: int, rank: int) -> None:
    """pytorch/pytorch#106637."""
    output = model(data(step, rank))
    output[:, 0].square().mean().backward(retain_graph=True)
    output[:, 1].abs().mean().backward()


def two_sizes_in_one_graph(model: nn.Module, step: int, rank: int) -> None:
    """facebookresearch/fairscale#617."""
    losses = [model(data(step, rank, rows)).square().mean() for rows in (2, 6)]
    (losses[0] + losses[1]).backward()


def chosen_and_rejected(model: nn.Module, step: int, rank: int) -> None:
    """pytorch/pytorch#171779: two forwards, one backward of a loss that joins them."""
    chosen, rejected = model(data(step, rank)), model(data(step + 50, rank))
    (-nn.functional.logsigmoid((chosen - rejected).sum(1))).mean().backward()


def evaluation_before_and_between(model: nn.Module, step: int, rank: int) -> None:
    """facebookresearch/fairscale#710, PsycheFoundation/nousnet#285."""
    model.eval()
    with torch.no_grad():
        model(data(step + 20, rank))
    model.train()
    loss = model(data(step, rank)).square().mean()
    with torch.inference_mode():
        model(data(step + 30, rank))
    loss.backward()


def backward_in_two_graphs(model: nn.Module, step: int, rank: int) -> None:
    """Two forwards, then their backwards in the order of the forwards."""
    losses = [model(data(step + shift, rank)).square().mean() for shift in (0, 60)]
    for loss in losses:
        loss.backward()


def a_failed_forward_before(model: nn.Module, step: int, rank: int) -> None:
    """A batch that raises, as after a CUDA out-of-memory error, and a smaller one in its place."""
    with pytest.raises(RuntimeError):
        model(torch.zeros(3, WIDTH + 1))
    model(data(step, rank)).square().mean().backward()


def train(case: Callable[..., None], recomputes: bool, prefetch: int) -> float:
    """Largest difference from plain torch after five steps."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with seeded(2):
        plain = Stack(recomputes)
    sharded = copy.deepcopy(plain)
    runtime = sshsdp.RuntimePolicy(dtype=None, prefetch=prefetch)
    units = (Block, "blocks.*.inner")
    engine = sshsdp.shard(sharded, units=units, runtime=runtime, update=OWN_DTYPES["update"])
    optimizer = engine.attach(torch.optim.SGD(sharded.parameters(), lr=0.1))
    expected = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(5):
        case(sharded, step, rank)
        optimizer.step()
        optimizer.zero_grad()
        for peer in range(size):
            case(plain, step, peer)
        for parameter in plain.parameters():
            assert parameter.grad is not None
            parameter.grad /= size
        expected.step()
        expected.zero_grad()
    weights = engine.full_state_dict(rank0_only=False)
    return max(relative_error(weights[name], value) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        two_losses_of_one_output,
        two_sizes_in_one_graph,
        chosen_and_rejected,
        evaluation_before_and_between,
        backward_in_two_graphs,
        a_failed_forward_before,
    ],
)
def test_unusual_calls_train_as_in_plain_torch(
    workers: Callable[[int], Any], case: Callable[..., None], recomputes: bool, prefetch: int
) -> None:
    assert_within(max(workers(2).run(train, case, recomputes, prefetch)), ROUNDING)


def generate_in_the_loop() -> tuple[list[list[int]], list[list[int]]]:
    """Tokens by rank, from sharded weights and from a plain copy: huggingface/trl#1726."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        num_hidden_layers=2,
        vocab_size=40,
        max_position_embeddings=32,
    )
    with seeded(4):
        model = LlamaForCausalLM(config)
    engine = sshsdp.shard(model, **OWN_DTYPES)
    optimizer = engine.attach(torch.optim.SGD(model.parameters(), lr=1.0))
    prompt = torch.arange(3 + 4 * dist.get_rank())[None]
    ours, theirs = [], []
    for _ in range(2):
        options = {"max_new_tokens": 2 + 3 * dist.get_rank(), "do_sample": False}
        with engine.unsharded():
            ours.append(model.generate(prompt, **options)[0].tolist())
        plain = LlamaForCausalLM(config)
        plain.load_state_dict(engine.full_state_dict(rank0_only=False))
        theirs.append(plain.generate(prompt, **options)[0].tolist())
        model(input_ids=prompt, labels=prompt).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return ours, theirs


def test_ranks_generate_unevenly_between_steps(workers: Callable[[int], Any]) -> None:
    for ours, theirs in workers(2).run(generate_in_the_loop):
        assert ours == theirs
