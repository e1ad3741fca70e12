"""The invariants of the design: one address space, views, names, collectives, freed memory."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sshsdp
from tests.support.oddities import ODDITIES
from tests.support.training import Recipe, make_optimizer, prepare_model, subject_of
from tests.support.zoo import SUBJECTS, Decoder

if TYPE_CHECKING:
    from collections.abc import Callable

ALL = [subject.name for subject in (*SUBJECTS, *ODDITIES)]
SIZES = [1, 2, 3, 4]


def shard(recipe: Recipe) -> tuple[nn.Module, sshsdp.Engine, torch.optim.Optimizer]:
    model = prepare_model(recipe)
    engine = sshsdp.shard(model, units=subject_of(recipe).units, runtime=recipe.runtime_policy)
    return model, engine, engine.attach(make_optimizer(recipe, model))


def forward_backward(recipe: Recipe, model: nn.Module, step: int = 0) -> None:
    subject = subject_of(recipe)
    subject.loss(model, subject.micro_batch(step, 0, dist.get_rank())).backward()


# 1. One address space


def cut_all() -> dict[str, dict[str, list[tuple[int, torch.Tensor]]]]:
    """Per subject and parameter, where this rank's pieces start and what they hold."""
    cuts = {}
    for name in ALL:
        _, engine, _ = shard(Recipe(subject=name))
        pieces: dict[str, list[tuple[int, torch.Tensor]]] = {}
        for fqn, part in engine.update_parameters():
            pieces.setdefault(fqn, []).append((part.start, part.tensor.clone()))
        cuts[name] = pieces
        engine.close()
    return cuts


@pytest.mark.parametrize("size", SIZES)
def test_every_element_of_every_parameter_is_in_one_update_region_of_one_rank(
    workers: Callable[[int], Any], size: int
) -> None:
    by_rank = workers(size).run(cut_all)
    for name in ALL:
        for fqn, parameter in prepare_model(Recipe(subject=name)).named_parameters():
            pieces = [piece for cuts in by_rank for piece in cuts[name].get(fqn, [])]
            if not parameter.requires_grad:
                assert not pieces, (name, fqn)
                continue
            pieces.sort(key=lambda piece: piece[0])
            stop = 0
            for start, values in pieces:
                assert start == stop, (name, fqn)
                stop += values.numel()
            assert stop == parameter.numel(), (name, fqn)
            whole = torch.cat([values for _, values in pieces]).view(parameter.shape)
            assert torch.equal(whole, parameter.detach()), (name, fqn)


# 2. Equal contiguous shards, and views of the gather output


def check_views() -> int:
    """Inside forward of every unit, its runtime parameters are views of the gather output."""
    num_checked = 0
    for name in ALL:
        recipe = Recipe(subject=name)
        model, engine, _ = shard(recipe)
        world = dist.get_world_size()
        for space in engine.spaces:
            assert space.layout.numel == world * space.runtime.shard.numel()
        with engine.unsharded():
            for unit in engine.units:
                num_checked += _check_gathered(unit)
        hooks = [
            unit.module.register_forward_pre_hook(functools.partial(_check_in_forward, unit))
            for unit in engine.units
        ]
        forward_backward(recipe, model)
        for hook in hooks:
            hook.remove()
        engine.close()
    return num_checked


def _check_in_forward(unit: Any, *_: Any) -> None:
    _check_gathered(unit)


def _check_gathered(unit: Any) -> int:
    checked = 0
    for space in unit.spaces:
        whole = space.runtime.gathered.flat
        parts = [torch.empty_like(space.runtime.shard) for _ in range(dist.get_world_size())]
        if not torch.is_grad_enabled() or dist.get_world_size() == 1:
            dist.all_gather(parts, space.runtime.shard)
            assert _same_bits(torch.cat(parts), whole)
        for slot in space.slots:
            data = slot.parameter.detach()
            assert data.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
            assert data.storage_offset() == slot.region.start
            assert data.stride() == tuple(slot.region.stride)
            checked += 1
    return checked


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    # Padding may hold anything, NaN included.
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_runtime_parameters_are_views_of_the_concatenated_shards(
    workers: Callable[[int], Any], size: int
) -> None:
    num_parameters = sum(
        len(list(prepare_model(Recipe(subject=name)).parameters())) for name in ALL
    )
    assert workers(size).run(check_views) == [num_parameters] * size


def check_update_views(dtype: torch.dtype) -> list[bool]:
    """Whether the optimizer's tensors share memory with the runtime shard, per space."""
    _, engine, optimizer = shard(Recipe(subject="decoder", dtype=dtype))
    storages = {t.untyped_storage().data_ptr() for g in optimizer.param_groups for t in g["params"]}
    return [space.runtime.shard.untyped_storage().data_ptr() in storages for space in engine.spaces]


def test_with_one_dtype_the_update_parameters_are_views_of_the_runtime_shards(
    workers: Callable[[int], Any],
) -> None:
    for shared in workers(2).run(check_update_views, torch.float32):
        assert all(shared)
    for shared in workers(2).run(check_update_views, torch.bfloat16):
        assert not any(shared)


# 5. Names and shapes


def names_and_shapes() -> None:
    for name in ALL:
        plain = prepare_model(Recipe(subject=name))
        model = prepare_model(Recipe(subject=name))
        before = dict(model.named_parameters())
        engine = sshsdp.shard(model, runtime=sshsdp.RuntimePolicy(dtype=torch.float32))
        after = dict(model.named_parameters())
        assert list(after) == list(before)
        for fqn, expected in plain.named_parameters():
            parameter = after[fqn]
            assert parameter is before[fqn]
            assert isinstance(parameter, nn.Parameter)
            assert parameter.shape == expected.shape
            assert (parameter.ndim, parameter.dtype) == (expected.ndim, expected.dtype)
            assert parameter.requires_grad == expected.requires_grad
        whole = engine.full_state_dict(rank0_only=False)
        assert list(whole) == list(plain.state_dict())
        for key, expected in plain.state_dict().items():
            assert whole[key].shape == expected.shape
            assert torch.equal(whole[key], expected), (name, key)
        engine.close()


@pytest.mark.parametrize("size", [1, 3])
def test_names_shapes_and_values_are_the_model_s_own(
    workers: Callable[[int], Any], size: int
) -> None:
    workers(size).run(names_and_shapes)


# 6. The same collectives in the same order


def issued(name: str, micro_batches: int) -> dict[str, list[tuple[str, int]]]:
    """What this rank issues in three steps, by kind and axis."""
    recipe = Recipe(subject=name)
    model, engine, optimizer = shard(recipe)
    sequences: dict[str, list[tuple[str, int]]] = {}
    with engine.record_collectives() as records:
        for step in range(3):
            for _ in range(micro_batches):
                forward_backward(recipe, model, step)
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    for record in records:
        sequence = sequences.setdefault(f"{record.axis}/{record.kind}", [])
        sequence.append((record.label, record.nbytes))
    return sequences


@pytest.mark.parametrize("name", ["decoder", "used by some ranks", "partly used", "nested units"])
def test_every_rank_issues_the_same_collectives_in_the_same_order(
    workers: Callable[[int], Any], name: str
) -> None:
    by_rank = workers(4).run(issued, name, 2)
    assert by_rank[0]["shard/all_gather"]
    assert by_rank[0]["shard/reduce_scatter"]
    for sequences in by_rank[1:]:
        assert sequences == by_rank[0]


# 7. Free means free


def memory_after_each_phase(name: str, prefetch: int, reshard: bool) -> dict[str, Any]:
    recipe = Recipe(subject=name, prefetch=prefetch, reshard=reshard)
    model, engine, optimizer = shard(recipe)
    found: dict[str, Any] = {"units": len(engine.units), "left": []}
    for step in range(3):
        forward_backward(recipe, model, step)
        found["left"].append(_allocated(engine))
        optimizer.step()
        optimizer.zero_grad()
        found["left"].append(_allocated(engine))
        with torch.no_grad():
            subject = subject_of(recipe)
            subject.loss(model, subject.micro_batch(step, 0, 0))
        found["left"].append(0 if not reshard else _allocated(engine))
    with engine.unsharded():
        pass
    found["left"].append(_allocated(engine))
    found["peak"] = engine.stats.peak_gathered_units
    return found


def _allocated(engine: sshsdp.Engine) -> int:
    """Bytes of gather outputs and gradient buffers."""
    gathered = sum(
        space.runtime.gathered.flat.untyped_storage().nbytes() for space in engine.spaces
    )
    return gathered + sum(space.gradient_bytes for space in engine.spaces)


@pytest.mark.parametrize("name", ALL)
def test_nothing_is_left_after_backward_after_the_step_and_after_evaluation(
    workers: Callable[[int], Any], name: str
) -> None:
    for found in workers(2).run(memory_after_each_phase, name, 1, True):
        assert found["left"] == [0] * len(found["left"])


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_at_most_one_unit_the_prefetched_ones_and_the_root_are_gathered(
    workers: Callable[[int], Any], prefetch: int
) -> None:
    for found in workers(2).run(peak_of_deep_decoder, prefetch):
        assert found == [1 + prefetch + 1] * 3


def peak_of_deep_decoder(prefetch: int) -> list[int]:
    model = Decoder(width=8, depth=7)
    policy = sshsdp.RuntimePolicy(dtype=torch.float32, prefetch=prefetch)
    engine = sshsdp.shard(model, runtime=policy)
    optimizer = engine.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    peaks = []
    for _ in range(3):
        model(torch.tensor([[1, 2, 3]])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        peaks.append(engine.stats.peak_gathered_units)
    return peaks


def test_units_kept_after_forward_are_free_after_backward(workers: Callable[[int], Any]) -> None:
    for found in workers(2).run(memory_after_each_phase, "decoder", 1, False):
        assert found["left"] == [0] * len(found["left"])
        assert found["peak"] == found["units"]


# Optimizer state


def state_numel(optimizer: Any, frozen: tuple[str, ...]) -> tuple[int, int, int]:
    """Elements of optimizer state and of update shards here, and of trainable parameters in all."""
    recipe = Recipe(subject="decoder", optimizer=optimizer, frozen=frozen)
    model, _, optimizer = shard(recipe)
    forward_backward(recipe, model)
    optimizer.step()
    state = sum(
        value.numel()
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, torch.Tensor) and value.ndim
    )
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return (
        state,
        sum(tensor.numel() for g in optimizer.param_groups for tensor in g["params"]),
        (trainable),
    )


@pytest.mark.parametrize("frozen", [(), ("blocks.?.attention.*", "embedding.*")])
def test_each_rank_holds_its_share_of_the_optimizer_state_and_none_for_frozen_parameters(
    workers: Callable[[int], Any], frozen: tuple[str, ...]
) -> None:
    for states_per_element, optimizer in ((2, "adamw"), (1, "sgd")):
        by_rank = workers(4).run(state_numel, optimizer, frozen)
        trainable = by_rank[0][2]
        padding = 256
        for state, update, _ in by_rank:
            assert state == states_per_element * update
            assert update <= trainable / 4 + padding
        assert trainable <= sum(update for _, update, _ in by_rank) <= trainable + padding


def test_an_optimizer_steps_a_few_large_tensors(workers: Callable[[int], Any]) -> None:
    """One flat tensor for each unit and param group, not one for each parameter."""
    for num_tensors, num_units in workers(2).run(_count_tensors):
        assert num_tensors == 2 * num_units


def _count_tensors() -> tuple[int, int]:
    recipe = Recipe(subject="decoder", decay_by_shape=True)
    _, engine, optimizer = shard(recipe)
    return sum(len(group["params"]) for group in optimizer.param_groups), len(engine.units)


class Encoded(nn.Module):
    """Frozen blocks in front of trained ones, with or without a graph."""

    def __init__(self, records: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.blocks[:2].requires_grad_(False)
        self.records = records

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(self.records):
            for block in self.blocks[:2]:
                x = block(x)
        for block in self.blocks[2:]:
            x = torch.tanh(block(x))
        return x


def count_gathers(records: bool) -> dict[str, int]:
    model = Encoded(records)
    engine = sshsdp.shard(model, runtime=sshsdp.RuntimePolicy(dtype=torch.float32))
    engine.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(2, 8)).sum().backward()
    with engine.record_collectives() as collectives:
        model(torch.ones(2, 8)).sum().backward()
    labels = [one.label for one in collectives if one.kind == "all_gather"]
    return {label: labels.count(label) for label in labels}


@pytest.mark.parametrize("records", [True, False])
def test_frozen_units_in_front_are_gathered_for_forward_only(
    workers: Callable[[int], Any], records: bool
) -> None:
    for counts in workers(2).run(count_gathers, records):
        # The last unit stays gathered between forward and backward.
        assert counts == {"blocks.0": 1, "blocks.1": 1, "blocks.2": 2, "blocks.3": 1}
