"""Bytes of whole matrices on owners: counted on a mesh, predicted by the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import sshsdp
from sshsdp.estimate.costs import model_cost
from sshsdp.estimate.hardware import HARDWARE
from sshsdp.estimate.optimizers import optimizer_cost
from sshsdp.estimate.plan import make_plan
from sshsdp.estimate.wire import axis_bytes, wire_bytes
from sshsdp.optim import muon_with_adamw
from tests.estimate.wire_cases import Block, Decoder

if TYPE_CHECKING:
    from collections.abc import Callable


class GatedBlock(Block):
    """Three matrices, so that no cut between shards is one between owners too."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__(width, inner)
        self.gate = nn.Linear(width, inner, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        return x + self.down(torch.relu(self.up(normed)) * self.gate(normed))


class GatedDecoder(Decoder):
    """With blocks of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            GatedBlock(12, width) for width in (20, 31, 9) for _ in range(NUM_EACH)
        )


# Enough of each size for every rank to own some of it.
NUM_EACH = 4

POLICIES: dict[str, tuple[sshsdp.RuntimePolicy, sshsdp.UpdatePolicy]] = {
    "fp32": (sshsdp.RuntimePolicy(dtype=torch.float32), sshsdp.UpdatePolicy()),
    "bf16": (sshsdp.RuntimePolicy(dtype=torch.bfloat16), sshsdp.UpdatePolicy()),
    "bf16, replicated": (
        sshsdp.RuntimePolicy(dtype=torch.bfloat16),
        sshsdp.UpdatePolicy(sharding="replicated"),
    ),
}


def count(mesh: tuple[int, int], policy: str) -> dict[str, Any]:
    """What this rank received in a step with Muon on owners, and what is predicted."""
    torch.manual_seed(0)
    model = GatedDecoder()
    runtime, update = POLICIES[policy]
    device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    engine = sshsdp.shard(model, device_mesh, runtime=runtime, update=update)
    optimizer = engine.attach(muon_with_adamw(model, method="owner", ns_dtype=torch.float32))
    for _ in range(2):
        model(torch.randint(0, 37, (4, 5))).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    counted = {kind: nbytes for kind, nbytes in engine.stats.wire.nbytes.items() if nbytes}
    layout = engine.layout
    engine.close()
    torch.manual_seed(0)
    with torch.device("meta"):
        meta = GatedDecoder()
    plan = make_plan(
        meta,
        model_name="decoder",
        mesh=mesh,
        optimizer=optimizer_cost("muon"),
        runtime_format=policy[:4],
        hardware=HARDWARE["H100"],
        update=update,
    )
    return {
        "counted": counted,
        "expected": wire_bytes(model_cost(layout, runtime, update)),
        "planned": plan.schemes[0].wire,
        "same_layout": plan.layout.digest() == layout.digest(),
    }


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mesh", [(2, 2), (1, 4), (4, 1)], ids=str)
def test_counted_bytes_are_the_planned_ones_on_average(
    workers: Callable[[int], Any], mesh: tuple[int, int], policy: str
) -> None:
    ranks = workers(4).run(count, mesh, policy)
    assert all(rank["same_layout"] for rank in ranks)
    expected = ranks[0]["expected"]
    assert expected == ranks[0]["planned"]
    for kind in {kind for rank in ranks for kind in rank["counted"]} | set(expected):
        mean = sum(rank["counted"].get(kind, 0) for rank in ranks) / len(ranks)
        # Owners share a shard's matrices to the element, but for one of a bucket.
        tolerance = 0.01 if "all_to_all" in kind else 0
        assert mean == pytest.approx(expected.get(kind, 0), rel=tolerance), kind


def test_over_replicate_muon_sends_less_than_an_all_reduce_of_gradients(
    workers: Callable[[int], Any],
) -> None:
    """Classic HSDP all-reduces fp32 gradients: 8 bytes for each element of a shard."""
    received = [
        axis_bytes(rank["counted"], "replicate") for rank in workers(4).run(count, (2, 2), "bf16")
    ]
    numel = sum(parameter.numel() for parameter in GatedDecoder().parameters())
    assert sum(received) / len(received) <= 2 * 4 * numel / 2 * (2 - 1) / 2


def llama_block_model() -> nn.Module:
    """Two blocks of Llama-3-8B's size."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=2,
        vocab_size=128256,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def test_over_nodes_muon_on_owners_stays_below_classic_hsdp() -> None:
    """On 16 x 8 ranks, with everything that the optimizer needs."""
    plan = make_plan(
        llama_block_model(),
        model_name="llama",
        mesh=(16, 8),
        optimizer=optimizer_cost("muon"),
        runtime_format="bf16",
        hardware=HARDWARE["H100"],
    )
    ours, _, hsdp = plan.schemes
    assert axis_bytes(ours.wire, "replicate") <= 0.77 * hsdp.wire["replicate/all_reduce"]
