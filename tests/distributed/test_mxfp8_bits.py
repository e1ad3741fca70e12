"""What publish and gather make of a parameter, against torchao's quantizer on the whole one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import sshsdp
from sshsdp.spaces.mxfp8_side import BlockSide
from tests.support.training import Recipe, make_optimizer, prepare_model, shard, subject_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from sshsdp.spaces.space import ShardedSpace

MESHES = [None, (1, 3), (2, 2), (3, 1), (4, 1)]


def world_of(mesh: tuple[int, int] | None) -> int:
    return 2 if mesh is None else mesh[0] * mesh[1]


def block_spaces(engine: sshsdp.Engine) -> list[ShardedSpace]:
    return [space for space in engine.spaces if isinstance(space.runtime, BlockSide)]


def num_wrong_bytes(engine: sshsdp.Engine, values: dict[str, torch.Tensor]) -> dict[str, int]:
    """Bytes of the gathered sections that are not those of the whole quantized values."""
    from tests.support.mxfp8_reference import blocks

    wrong = {}
    with engine.unsharded():
        for space in block_spaces(engine):
            side: Any = space.runtime
            for slot in [*space.slots, *space.packs]:
                members = getattr(slot, "members", [slot])
                whole = torch.cat([values[member.name] for member in members])
                for orientation, dim in (("rowwise", -1), ("columnwise", -2)):
                    ours = side.blocks(slot.place, orientation)
                    for mine, theirs in zip(
                        (ours.data, ours.scales), blocks(whole, dim), strict=True
                    ):
                        differs = mine.view(torch.uint8) != theirs
                        wrong[f"{slot.name} {orientation}"] = int(differs.sum())
    return wrong


def spread_out(engine: sshsdp.Engine) -> None:
    """Give masters magnitudes over many octaves, by the way of a checkpoint."""
    generator = torch.Generator().manual_seed(7)
    state = engine.full_state_dict(rank0_only=False)
    for value in state.values():
        if value.is_floating_point() and value.ndim > 1:
            value.mul_(torch.exp2(torch.randint(-20, 12, value.shape, generator=generator)))
    engine.load_full_state_dict(state)


def check_bits(recipe: Recipe) -> tuple[dict[str, int], int]:
    model, engine, optimizer = shard(recipe)
    subject = subject_of(recipe)
    found: dict[str, int] = {}
    for step in range(2):
        subject.loss(model, subject.micro_batch(step, 0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        found |= num_wrong_bytes(engine, engine.full_state_dict(rank0_only=False))
    spread_out(engine)
    found |= num_wrong_bytes(engine, engine.full_state_dict(rank0_only=False))
    num_transposed = sum(slot.region.transposed for slot in engine.slots)
    engine.close()
    return found, num_transposed


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(
    ("subject", "packs"),
    [
        ("decoder of 64", False),
        ("odd multiples", False),
        ("grouped experts", False),
        ("llama of 64", True),
    ],
)
def test_gathered_blocks_are_those_of_whole_parameters(
    workers: Callable[[int], Any], subject: str, packs: bool, mesh: Any
) -> None:
    recipe = Recipe(subject=subject, mxfp8=True, mesh=mesh, packs=packs)
    found, _ = workers(world_of(mesh)).run(check_bits, recipe)[0]
    assert len(found) >= 8
    assert not any(found.values()), found


def test_a_wide_matrix_is_stored_transposed_and_quantized_as_it_is(
    workers: Callable[[int], Any],
) -> None:
    """Where its other side is what can be cut; else this layout would go untested."""
    found, num_transposed = workers(4).run(check_bits, Recipe(subject="wide", mxfp8=True))[0]
    assert num_transposed > 0
    assert not any(found.values()), found


def frozen_blocks(mesh: tuple[int, int] | None) -> tuple[dict[str, int], list[float]]:
    recipe = Recipe(subject="odd multiples", mxfp8=True, mesh=mesh, frozen=("blocks.*",))
    _, engine, _ = shard(recipe)
    first = engine.full_state_dict(rank0_only=False)
    found = num_wrong_bytes(engine, first)
    original = prepare_model(recipe).state_dict()
    errors = [
        ((first[name] - original[name]).norm() / original[name].norm()).item()
        for name in first
        if name.endswith("up.weight")
    ]
    engine.load_full_state_dict(first)
    again = engine.full_state_dict(rank0_only=False)
    assert all(torch.equal(first[name], again[name]) for name in first)
    found |= num_wrong_bytes(engine, again)
    engine.close()
    return found, errors


@pytest.mark.parametrize("mesh", [None, (2, 2)], ids=str)
def test_frozen_parameters_are_their_quantized_values(
    workers: Callable[[int], Any], mesh: Any
) -> None:
    """What a state dict shows brings the same blocks back, in both orientations."""
    found, errors = workers(world_of(mesh)).run(frozen_blocks, mesh)[0]
    assert len(found) >= 8
    assert not any(found.values()), found
    assert all(0.01 < error < 0.05 for error in errors)


def bytes_of_a_step(recipe: Recipe) -> tuple[dict[str, int], dict[str, int], list[tuple[str, int]]]:
    """Bytes received in the third step, their bound, and the gathers of it in order."""
    model, engine, optimizer = shard(recipe)
    subject = subject_of(recipe)
    for step in range(3):
        with engine.record_collectives() as records:
            subject.loss(model, subject.micro_batch(step, 0, dist.get_rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
    stats = engine.stats
    spaces = block_spaces(engine)
    numel = sum(space.layout.numel for space in spaces)
    dense = sum(space.layout.numel for space in engine.spaces) - numel
    gathers = [(r.label, r.nbytes) for r in records if r.kind == "all_gather" and r.axis == "shard"]
    engine.close()
    return dict(stats.wire.nbytes), {"blocks": numel, "dense": dense}, gathers


@pytest.mark.parametrize(
    ("way", "orientations"),
    [
        ({}, 2),
        ({"reshard": False}, 2),
        ({"checkpointing": ("around", False)}, 3),
        ({"checkpointing": ("inside", True)}, 3),
    ],
    ids=["plain", "kept after forward", "recompute around units", "recompute inside units"],
)
def test_a_step_gathers_each_direction_once_and_a_recomputed_forward_once_more(
    workers: Callable[[int], Any], way: dict[str, Any], orientations: int
) -> None:
    recipe = Recipe(subject="decoder of 64", mxfp8=True, **way)
    _, numel, gathers = workers(2).run(bytes_of_a_step, recipe)[0]
    # The unit that ends forward and begins backward keeps what forward gathered.
    kept = numel["blocks"] // 3 if way.get("checkpointing") else 0
    sent = {nbytes for _, nbytes in gathers}
    per_unit = numel["blocks"] // 3
    assert {per_unit, per_unit // 32} <= sent
    moved = sum(n for _, n in gathers if n in (per_unit, per_unit // 32))
    assert moved == (orientations * numel["blocks"] - kept) * 33 // 32


def gathers_of_a_block(recipe: Recipe) -> list[int]:
    """Bytes of the dense rest of a unit, and of its gathers in forward and in backward."""
    model, engine, optimizer = shard(recipe)
    subject = subject_of(recipe)
    for step in range(3):
        with engine.record_collectives() as records:
            subject.loss(model, subject.micro_batch(step, 0, dist.get_rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
    unit = engine.units[1]
    rest = sum(slot.parameter.numel() for slot in unit.slots if slot.parameter.ndim < 2)
    halves = [records[: len(records) // 2], records[len(records) // 2 :]]
    engine.close()
    return [
        rest * 2,
        *(
            sum(r.nbytes for r in half if r.kind == "all_gather" and r.label == unit.name)
            for half in halves
        ),
    ]


def test_each_direction_moves_half_of_bfloat16s_bytes_and_the_scales(
    workers: Callable[[int], Any],
) -> None:
    """Norms and biases are bf16 in both, and left out; every element is 33 / 32 bytes."""
    quantized = Recipe(subject="decoder of 64", mxfp8=True, dtype=torch.bfloat16)
    dense = Recipe(subject="decoder of 64", dtype=torch.bfloat16)
    rest, *ours = workers(2).run(gathers_of_a_block, quantized)[0]
    _, *theirs = workers(2).run(gathers_of_a_block, dense)[0]
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - rest) / (other - rest) == pytest.approx(33 / 64)
    assert 33 / 64 <= 1.04 / 2


def publishes_once(recipe: Recipe) -> tuple[int, int]:
    model, engine, optimizer = shard(recipe)
    subject = subject_of(recipe)
    for micro in range(3):
        with engine.no_sync(micro < 2):
            subject.loss(model, subject.micro_batch(0, micro, dist.get_rank())).backward()
    optimizer.step()
    stats, expected = engine.stats, sum(s.runtime.shard_nbytes for s in block_spaces(engine))
    engine.close()
    return stats.publish_bytes, expected


def test_a_step_quantizes_once_whatever_the_number_of_micro_batches(
    workers: Callable[[int], Any],
) -> None:
    recipe = Recipe(subject="decoder of 64", mxfp8=True)
    published, expected = workers(2).run(publishes_once, recipe)[0]
    assert published == expected > 0


def saved_and_loaded(folder: str, mxfp8_saves: bool) -> tuple[dict[str, float], int]:
    """Save in one format, load in the other; returns errors of the loaded masters, wrong bytes."""
    saving, loading = (
        Recipe(subject="odd multiples", mxfp8=flag) for flag in (mxfp8_saves, not mxfp8_saves)
    )
    model, engine, optimizer = shard(saving)
    subject = subject_of(saving)
    for step in range(2):
        subject.loss(model, subject.micro_batch(step, 0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = engine.full_state_dict(rank0_only=False)
    engine.save(folder, optimizer)
    engine.close()
    model, engine, optimizer = shard(loading)
    engine.load(folder, optimizer)
    loaded = engine.full_state_dict(rank0_only=False)
    wrong = sum(num_wrong_bytes(engine, loaded).values())
    subject.loss(model, subject.micro_batch(2, 0, dist.get_rank())).backward()
    optimizer.step()
    engine.close()
    return {name: (loaded[name] - saved[name]).abs().max().item() for name in saved}, wrong


@pytest.mark.parametrize("mxfp8_saves", [True, False], ids=["mxfp8 to fp32", "fp32 to mxfp8"])
def test_checkpoints_hold_masters_and_load_into_any_format(
    workers: Callable[[int], Any], tmp_path: Any, mxfp8_saves: bool
) -> None:
    errors, wrong = workers(2).run(saved_and_loaded, str(tmp_path / "saved"), mxfp8_saves)[0]
    assert errors and not any(errors.values())
    assert wrong == 0


def resumed(folder: str) -> bool:
    """Whether frozen blocks and their gradients are the same after a save and a load."""
    recipe = Recipe(subject="odd multiples", mxfp8=True, frozen=("blocks.*.up.weight",))
    subject = subject_of(recipe)
    batch = subject.micro_batch(0, 0, dist.get_rank())
    model, engine, optimizer = shard(recipe)
    engine.save(folder, optimizer)

    def gradients(model: Any, engine: sshsdp.Engine) -> list[torch.Tensor]:
        subject.loss(model, batch).backward()
        found = [u.grad.clone() for _, u in engine.update_parameters() if u.grad is not None]
        engine.zero_grad()
        return found

    before = gradients(model, engine)
    engine.close()
    other = prepare_model(recipe)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    engine = sshsdp.shard(other, runtime=recipe.runtime_policy)
    optimizer = engine.attach(make_optimizer(recipe, other))
    engine.load(folder, optimizer)
    after = gradients(other, engine)
    engine.close()
    return len(before) == len(after) > 0 and all(
        torch.equal(a, b) for a, b in zip(before, after, strict=True)
    )


def test_a_frozen_base_is_the_same_after_a_checkpoint(
    workers: Callable[[int], Any], tmp_path: Any
) -> None:
    assert all(workers(2).run(resumed, str(tmp_path / "saved")))
