"""Troubles that people had with dtypes and quantized weights, and that are not to be had here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import sshsdp
from tests.distributed.test_mxfp8_bits import num_wrong_bytes, world_of
from tests.support.training import Recipe, shard, subject_of

if TYPE_CHECKING:
    from collections.abc import Callable

BF16 = torch.bfloat16


class Watched(nn.Module):
    """A block that is given a table beside its input, and notes what dtypes it sees."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.seen: list[tuple[torch.dtype, ...]] = []

    def forward(self, hidden: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        raised = self.up(hidden)
        self.seen.append((raised.dtype, table.dtype))
        return hidden + self.down((raised * table.repeat(2)).to(raised.dtype))


class Tabled(nn.Module):
    """Blocks, recomputed in backward if asked for, and a table that all of them are given."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Watched(64) for _ in range(2))
        self.register_buffer("table", torch.linspace(1, 2, 64))
        self.use_reentrant = use_reentrant

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.use_reentrant is None:
                hidden = block(hidden, self.table)
            else:
                hidden = checkpoint(block, hidden, self.table, use_reentrant=self.use_reentrant)
        return hidden


def dtypes_seen(
    use_reentrant: bool | None, dtype: torch.dtype, runtime_format: Any, autocast: bool
) -> tuple[list[Any], torch.dtype]:
    """What each block saw in one forward and backward, and the table's dtype afterwards."""
    model = Tabled(use_reentrant)
    engine = sshsdp.shard(model, runtime=sshsdp.RuntimePolicy(dtype=dtype, format=runtime_format))
    engine.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.autocast("cpu", BF16, enabled=autocast):
        loss = model(torch.ones(4, 64, requires_grad=True)).float().sum()
    loss.backward()
    engine.close()
    return [block.seen for block in model.blocks], model.table.dtype


@pytest.mark.parametrize("runtime_format", [None, "mxfp8"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputed_forward_has_the_dtypes_of_the_first(
    workers: Callable[[int], Any], use_reentrant: bool, runtime_format: Any
) -> None:
    """Recomputation under fully_shard had lost the autocast context: pytorch/pytorch#148831."""
    blocks, _ = workers(2).run(dtypes_seen, use_reentrant, torch.float32, runtime_format, True)[0]
    assert blocks == [[(BF16, torch.float32)] * 2] * 2


@pytest.mark.parametrize("runtime_format", [None, "mxfp8"])
def test_tables_and_buffers_keep_their_dtype(
    workers: Callable[[int], Any], runtime_format: Any
) -> None:
    """Blocks had fp32 tables cast to bf16: pytorch/torchtitan#2881. Buffers: pytorch#146114."""
    blocks, buffer = workers(2).run(dtypes_seen, None, BF16, runtime_format, False)[0]
    assert blocks == [[(BF16, torch.float32)]] * 2
    assert buffer == torch.float32


def sum_small(mesh: tuple[int, int] | None) -> float:
    """Rank 0's gradient is 1, the others' are 2**-9, which bf16 cannot add to it."""
    model = nn.Linear(1, 1, bias=False)
    names = ("replicate", "shard")
    device_mesh = mesh and dist.init_device_mesh("cpu", mesh, mesh_dim_names=names)
    engine = sshsdp.shard(model, device_mesh, runtime=sshsdp.RuntimePolicy(dtype=BF16))
    engine.attach(torch.optim.SGD(model.parameters(), lr=0.0))
    model(torch.full((1, 1), 1.0 if dist.get_rank() == 0 else 2.0**-9)).sum().backward()
    norm = engine.clip_grad_norm_(1e9).item()
    engine.close()
    return norm


@pytest.mark.parametrize("mesh", [None, (2, 2), (4, 1)], ids=str)
def test_bf16_gradients_are_summed_over_ranks_in_fp32(
    workers: Callable[[int], Any], mesh: Any
) -> None:
    """Sums in bf16 grew unstable with the number of ranks: pytorch/pytorch#106395."""
    assert workers(4).run(sum_small, mesh) == [(1 + 3 * 2.0**-9) / 4] * 4


def small_step(runtime_format: Any) -> dict[str, tuple[torch.dtype, float]]:
    """Dtype of each master, and how far a step of 2**-12 took it."""
    model = nn.Sequential(nn.Linear(64, 64, dtype=BF16))
    model.register_parameter("A_log", nn.Parameter(torch.ones(8)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    engine = sshsdp.shard(model, runtime=sshsdp.RuntimePolicy(formats={"0.weight": runtime_format}))
    optimizer = engine.attach(torch.optim.SGD(model.parameters(), lr=2.0**-12))
    (model(torch.ones(1, 64, dtype=BF16)).sum() + model.A_log.sum()).backward()
    optimizer.step()
    state = engine.full_state_dict(rank0_only=False)
    engine.close()
    return {name: (v.dtype, 1 - v.flatten()[0].item()) for name, v in state.items()}


@pytest.mark.parametrize("runtime_format", [sshsdp.DenseFormat(BF16), sshsdp.MXFP8Format()])
def test_masters_are_fp32_whatever_the_model_was_loaded_in(
    workers: Callable[[int], Any], runtime_format: Any
) -> None:
    """A model in bf16 trained bf16 masters in silence: huggingface/accelerate#3979.

    Models of several dtypes failed: NVIDIA-NeMo/Automodel#2419.
    """
    found = workers(2).run(small_step, runtime_format)[0]
    assert found == dict.fromkeys(["A_log", "0.weight", "0.bias"], (torch.float32, 2.0**-12))


def looked_at(mesh: Any, folder: str | None) -> tuple[dict[str, torch.Tensor], int]:
    """Weights after four steps, and stale bytes; a folder means looking and saving in between."""
    recipe = Recipe(subject="decoder of 64", mxfp8=True, mesh=mesh)
    model, engine, optimizer = shard(recipe)
    subject, rank, wrong = subject_of(recipe), dist.get_rank(), 0
    for step in range(4):
        subject.loss(model, subject.micro_batch(step, 0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if folder is not None:
            with torch.no_grad():
                subject.loss(model.eval(), subject.micro_batch(step, 1, rank))
            engine.save(str(Path(folder) / str(step)), optimizer)
            model.train()
            wrong += sum(num_wrong_bytes(engine, engine.full_state_dict(rank0_only=False)).values())
    weights = engine.full_state_dict(rank0_only=False)
    engine.close()
    return weights, wrong


@pytest.mark.parametrize("mesh", [None, (2, 2)], ids=str)
def test_evaluating_and_saving_between_steps_leaves_nothing_stale(
    workers: Callable[[int], Any], tmp_path: Path, mesh: Any
) -> None:
    """An evaluation left the columnwise copy stale: NVIDIA/Megatron-LM#4563.

    A save gathered stale data or zeros from a shared buffer: NVIDIA/Megatron-LM#5236.
    """
    expected, _ = workers(world_of(mesh)).run(looked_at, mesh, None)[0]
    weights, wrong = workers(world_of(mesh)).run(looked_at, mesh, str(tmp_path))[0]
    assert wrong == 0
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
