"""Troubles that people had with numbers under sharded training, and that are not to be had here."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import sshsdp
from tests.support.compare import (
    ROUNDING,
    assert_close,
    assert_weights_close,
    assert_within,
    relative_error,
)
from tests.support.training import (
    OWN_DTYPES,
    Recipe,
    prepare_model,
    shard,
    subject_of,
    train_plain,
    train_sshsdp,
)

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("mesh", [None, (2, 2), (4, 1), (1, 4)], ids=str)
def test_the_norm_is_that_of_the_whole_batch_on_every_mesh(
    workers: Callable[[int], Any], mesh: Any
) -> None:
    """The norm under HSDP was eight times that under FSDP: pytorch/torchtitan#2318."""
    recipe = Recipe(subject="decoder", mesh=mesh, clip=0.3, steps=3)
    norms = workers(4).run(train_sshsdp, recipe)[0].norms
    assert norms == pytest.approx(train_plain(recipe, 4).norms, rel=ROUNDING)


def norm_of_accumulated(recipe: Recipe, parts: int) -> float:
    """The gradient norm of four rows, given as one batch or in parts."""
    model, engine, _ = shard(recipe)
    rows = subject_of(recipe).micro_batch(0, 0, dist.get_rank()).repeat(2, 1)
    rows[1:3] = rows[1:3].flip(1)
    for index, part in enumerate(rows.chunk(parts)):
        context = engine.no_sync() if index + 1 < parts else contextlib.nullcontext()
        with context:
            (subject_of(recipe).loss(model, part) / parts).backward()
    return engine.clip_grad_norm_(1e9).item()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("mesh", [None, (2, 2)], ids=str)
def test_micro_batches_give_the_gradient_of_one_larger_batch(
    workers: Callable[[int], Any], double: None, mesh: Any, dtype: torch.dtype | None
) -> None:
    """Accumulation gave loss spikes: pytorch/torchtitan#813, huggingface/accelerate#2866."""
    recipe = Recipe(subject="decoder", mesh=mesh, dtype=dtype)
    whole = workers(4).run(norm_of_accumulated, recipe, 1)[0]
    for parts in (2, 4):
        norm = workers(4).run(norm_of_accumulated, recipe, parts)[0]
        assert norm == pytest.approx(whole, rel=2.0**-8 if dtype else ROUNDING)


def clip_tiny() -> tuple[float, float, bool]:
    model = nn.Linear(4, 4)
    engine = sshsdp.shard(model, **OWN_DTYPES)
    engine.attach(torch.optim.SGD(model.parameters(), lr=1.0))
    (model(torch.ones(1, 4)).sum() * 1e-6).backward()
    norm = engine.clip_grad_norm_(1e-6)
    after = engine.clip_grad_norm_(1.0)
    return norm.item(), after.item(), type(norm) is torch.Tensor


@pytest.mark.usefixtures("double")
def test_a_norm_is_one_plain_number_before_anything_is_divided_by_it(
    workers: Callable[[int], Any],
) -> None:
    """The 1e-6 in the clip coefficient was added once per rank: pytorch/pytorch#149768."""
    model = nn.Linear(4, 4)
    (model(torch.ones(1, 4)).sum() * 1e-6).backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), 1e-6).item()
    expected_after = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    for norm, after, is_plain in workers(4).run(clip_tiny):
        assert is_plain
        assert norm == pytest.approx(expected, rel=ROUNDING, abs=0)
        assert after == pytest.approx(expected_after, rel=ROUNDING, abs=0)


def clip_mixed() -> float:
    """Two runtime dtypes, frozen and trainable parameters: several address spaces in a unit."""
    recipe = Recipe(subject="decoder", dtype=torch.bfloat16, frozen=("blocks.0.up.*", "position"))
    formats = {"*norm*": sshsdp.DenseFormat(torch.float32)}
    model, engine, _ = shard(recipe, sshsdp.RuntimePolicy(dtype=torch.bfloat16, formats=formats))
    assert max(len(unit.spaces) for unit in engine.units) == 3
    subject_of(recipe).loss(model, subject_of(recipe).micro_batch(0, 0, 0)).backward()
    norm = engine.clip_grad_norm_(1e9).item()
    squares = sum(
        part.grad.square().sum() for _, part in engine.update_parameters() if part.grad is not None
    )
    dist.all_reduce(squares)
    assert norm == pytest.approx(squares.sqrt().item(), rel=1e-5)
    return norm


def test_one_norm_covers_units_of_several_dtypes(workers: Callable[[int], Any]) -> None:
    """Clipping failed over mixed kinds of parameters: pytorch/pytorch#180346, accelerate#4219."""
    norms = workers(2).run(clip_mixed)
    assert norms[0] == norms[1] > 0


# Unequal numbers of tokens: ranks and micro-batches weigh in by their tokens, not alike.
TOKENS = [[5, 1], [2, 7]]


def token_sum(model: nn.Module, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows, targets = torch.randn(count, 6, generator=generator), torch.arange(count) % 3
    return functional.cross_entropy(model(rows), targets, reduction="sum")


def token_mean_gradient() -> dict[str, torch.Tensor]:
    """Each micro-batch's sum, over all tokens of the step, times the ranks that are averaged."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    engine = sshsdp.shard(model, **OWN_DTYPES)
    engine.attach(torch.optim.SGD(model.parameters(), lr=1.0))
    rank, world = dist.get_rank(), dist.get_world_size()
    total = torch.tensor(float(sum(TOKENS[rank])))
    dist.all_reduce(total)
    for micro, count in enumerate(TOKENS[rank]):
        with engine.no_sync() if micro == 0 else contextlib.nullcontext():
            (token_sum(model, count, 10 * rank + micro) * world / total).backward()
    return {name: part.grad.clone() for name, part in engine.update_parameters()}


@pytest.mark.usefixtures("double")
def test_a_mean_over_tokens_is_had_by_one_known_factor(workers: Callable[[int], Any]) -> None:
    """Gradients are averaged over ranks, once, not by micro-batch: verl-project/verl-SpeCo#29.

    See also verl-project/verl#5625 and radixark/miles#3231, where the token counts went astray.
    """
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    sums = [
        token_sum(model, n, 10 * r + m) for r, row in enumerate(TOKENS) for m, n in enumerate(row)
    ]
    (sum(sums) / 15).backward()
    by_rank = workers(2).run(token_mean_gradient)
    for name, parameter in model.named_parameters():
        parts = [gradients[name] for gradients in by_rank if name in gradients]
        assert_within(relative_error(torch.cat(parts), parameter.grad.flatten()), ROUNDING, name)


def count_while_accumulating(mesh: Any) -> dict[str, int]:
    recipe = Recipe(subject="decoder", mesh=mesh)
    model, engine, _ = shard(recipe)
    subject_of(recipe).loss(model, subject_of(recipe).micro_batch(0, 0, 0)).backward()
    counts: dict[str, int] = {}
    with engine.record_collectives() as records, engine.no_sync():
        for micro in range(3):
            subject_of(recipe).loss(model, subject_of(recipe).micro_batch(0, micro, 0)).backward()
    for record in records:
        counts[record.kind] = counts.get(record.kind, 0) + 1
    return counts


@pytest.mark.parametrize("mesh", [None, (2, 2)], ids=str)
def test_nothing_is_reduced_under_no_sync(workers: Callable[[int], Any], mesh: Any) -> None:
    """no_sync silently did nothing for sharded modules: NVIDIA/cosmos-framework#161."""
    for counts in workers(4).run(count_while_accumulating, mesh):
        assert set(counts) == {"all_gather"}


def accumulate_small(defers: bool) -> float:
    """One micro-batch's gradient is 1, the next one's 2**-9, which bf16 cannot add to it."""
    model = nn.Linear(1, 1, bias=False)
    engine = sshsdp.shard(model, runtime=sshsdp.RuntimePolicy(dtype=torch.bfloat16))
    engine.attach(torch.optim.SGD(model.parameters(), lr=0.0))
    with engine.no_sync() if defers else contextlib.nullcontext():
        model(torch.ones(1, 1)).sum().backward()
    model(torch.full((1, 1), 2.0**-9)).sum().backward()
    return engine.clip_grad_norm_(1e9).item()


@pytest.mark.parametrize("defers", [True, False])
def test_bf16_micro_batches_are_added_up_in_fp32(
    workers: Callable[[int], Any], defers: bool
) -> None:
    """Accumulation in bf16 gave another loss curve: deepspeedai/DeepSpeed#5898."""
    assert workers(2).run(accumulate_small, defers) == [1 + 2.0**-9] * 2


@pytest.mark.usefixtures("double")
def test_fifty_steps_of_adamw_equal_plain_torch(workers: Callable[[int], Any]) -> None:
    """Losses differed between implementations in long AdamW runs: pytorch/torchtitan#724."""
    recipe = Recipe(subject="decoder", steps=50, clip=1.0)
    assert_close(workers(2).run(train_sshsdp, recipe)[0], train_plain(recipe, 2))


def look_before_the_first_step(looks: bool) -> dict[str, torch.Tensor]:
    recipe = Recipe(subject="decoder", decay_by_shape=True)
    model, engine, optimizer = shard(recipe)
    if looks:
        assert not optimizer.state
        assert not engine.full_optimizer_state_dict(optimizer).get("state")
        engine.full_state_dict()
        with engine.unsharded():
            pass
        assert not optimizer.state
    subject_of(recipe).loss(model, subject_of(recipe).micro_batch(0, 0, dist.get_rank())).backward()
    optimizer.step()
    steps = {float(state["step"]) for state in optimizer.state.values()}
    assert steps == {1.0}
    return engine.full_state_dict()


def test_asking_for_states_before_the_first_step_changes_nothing(
    workers: Callable[[int], Any],
) -> None:
    """States came of a step that counted: pytorch/torchtitan#4382, deepspeedai/DeepSpeed#5104."""
    looked, straight = (workers(2).run(look_before_the_first_step, looks)[0] for looks in (1, 0))
    assert all(torch.equal(value, straight[name]) for name, value in looked.items())


def first_loss_after_load(recipe: Recipe) -> tuple[float, float]:
    """Loss of a pretrained model, and of a fresh sharded one that loads its weights."""
    pretrained = subject_of(recipe).model(seed=7)
    batch = subject_of(recipe).micro_batch(0, 0, 0)
    model, engine, _ = shard(recipe)
    engine.load_full_state_dict(pretrained.state_dict() if dist.get_rank() == 0 else {})
    with torch.no_grad():
        return subject_of(recipe).loss(model, batch).item(), subject_of(recipe).loss(
            pretrained, batch
        ).item()


@pytest.mark.parametrize("mesh", [None, (2, 1)], ids=str)
def test_the_first_loss_is_that_of_the_loaded_weights(
    workers: Callable[[int], Any], mesh: Any
) -> None:
    """Training began at a loss of 13.9 instead of 2.4: NVIDIA/Megatron-LM#2769."""
    for ours, expected in workers(2).run(first_loss_after_load, Recipe(subject="llama", mesh=mesh)):
        assert ours == expected


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}])
def test_every_implementation_of_an_optimizer_takes_the_update_parameters(
    workers: Callable[[int], Any], options: dict[str, bool]
) -> None:
    """foreach failed over mixed kinds of tensors: pytorch/pytorch#183207."""
    ours = workers(2).run(step_with, options)[0]
    model = prepare_model(Recipe(subject="frozen mixed in"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    for _ in range(5):
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_weights_close(ours, model.state_dict())


def step_with(options: dict[str, bool]) -> dict[str, torch.Tensor]:
    model = prepare_model(Recipe(subject="frozen mixed in"))
    engine = sshsdp.shard(model, **OWN_DTYPES)
    optimizer = engine.attach(torch.optim.AdamW(model.parameters(), lr=1e-2, **options))
    for _ in range(5):
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return engine.full_state_dict()
