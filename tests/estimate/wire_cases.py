"""Trains a small decoder over several meshes and writes down what was counted."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import sshsdp
from sshsdp.estimate.costs import model_cost
from sshsdp.estimate.memory import rank_memory
from sshsdp.estimate.optimizers import optimizer_cost
from sshsdp.estimate.planning import plan_layout, specs_by_unit
from sshsdp.estimate.wire import expected_wire_bytes

MICRO_BATCHES = 2


class Block(nn.Module):
    """A residual block with odd sizes, so that there is padding."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Decoder(nn.Module):
    """Embedding, blocks of different sizes, tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 12)
        self.blocks = nn.ModuleList([Block(12, 20), Block(12, 31), Block(12, 9)])
        self.head = nn.Linear(12, 37, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(frozen: bool) -> Decoder:
    torch.manual_seed(0)
    model = Decoder()
    if frozen:
        for name, parameter in model.named_parameters():
            # As with adapters: only a few parameters of the inner blocks are trained.
            parameter.requires_grad_(name.startswith("blocks.1") or name.endswith("norm.bias"))
    return model


def cases(world_size: int) -> list[dict[str, object]]:
    shapes = {4: [(2, 2), (1, 4), (4, 1)], 2: [(1, 2)]}[world_size]
    policies = [
        {"sharding": "hierarchical", "dtype": "float32", "reshard": True, "frozen": False},
        {"sharding": "replicated", "dtype": "bfloat16", "reshard": True, "frozen": False},
        {"sharding": "hierarchical", "dtype": "bfloat16", "reshard": False, "frozen": False},
        {"sharding": "hierarchical", "dtype": "bfloat16", "reshard": True, "frozen": True},
    ]
    return [{"mesh": list(mesh), **policy} for mesh, policy in itertools.product(shapes, policies)]


def run(case: dict[str, object]) -> dict[str, object]:
    num_replicas, num_shards = case["mesh"]
    mesh = init_device_mesh(
        "cpu", (num_replicas, num_shards), mesh_dim_names=("replicate", "shard")
    )
    runtime = sshsdp.RuntimePolicy(
        dtype=getattr(torch, case["dtype"]), reshard_after_forward=case["reshard"]
    )
    update = sshsdp.UpdatePolicy(sharding=case["sharding"])
    model = build(case["frozen"])
    with torch.device("meta"):
        specs = specs_by_unit(build(case["frozen"]), runtime)
    planned = plan_layout(specs, num_replicas=num_replicas, num_shards=num_shards, update=update)
    engine = sshsdp.shard(model, mesh, runtime=runtime, update=update)
    optimizer = engine.attach(torch.optim.AdamW(model.parameters(), lr=1e-3))
    tokens = torch.randint(0, 37, (MICRO_BATCHES, 4, 5))

    def step(num_micro_batches: int, clip: bool) -> dict[str, int]:
        for index in range(num_micro_batches):
            if index < num_micro_batches - 1:
                with engine.no_sync():
                    model(tokens[index]).float().square().mean().backward()
            else:
                model(tokens[index]).float().square().mean().backward()
        if clip:
            engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        return {kind: nbytes for kind, nbytes in engine.stats.wire.nbytes.items() if nbytes}

    counted, expected = {}, {}
    step(1, clip=False)
    for label, num_micro_batches, clip in (
        ("one", 1, False),
        ("clipped", 1, True),
        ("accumulated", MICRO_BATCHES, True),
    ):
        counted[label] = step(num_micro_batches, clip)
        expected[label] = expected_wire_bytes(
            engine.layout,
            runtime,
            update,
            num_micro_batches=num_micro_batches,
            clips_gradients=clip,
        )
        if label == "one":
            stats = engine.stats
    cost = model_cost(engine.layout, runtime, update)
    memory = rank_memory(cost, optimizer_cost("adamw"))
    local = [value for state in optimizer.state.values() for value in state.values()]
    result = {
        "counted": counted,
        "expected": expected,
        "same_layout": planned.digest() == engine.layout.digest(),
        "peak_gathered": [stats.peak_gathered_bytes, memory.gathered_units],
        "peak_gradients": [stats.peak_gradient_bytes, memory.unsharded_gradients],
        "runtime_shards": [
            sum(space.runtime.shard_nbytes for space in engine.spaces),
            memory.runtime_shards,
        ],
        "masters": [
            sum(
                space.update_shard.nbytes
                for space in engine.spaces
                if space.trainable and not space.is_shared
            ),
            memory.masters,
        ],
        "optimizer_state": [
            sum(value.nbytes for value in local if value.dim()),
            memory.optimizer_state,
        ],
    }
    engine.close()
    return result


def run_cases() -> list[dict[str, object]]:
    """All cases of this world size, on this rank."""
    return [{"case": case, **run(case)} for case in cases(dist.get_world_size())]
