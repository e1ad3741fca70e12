"""Training through the accelerator equals Accelerate's own DDP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerate.utils import GradientAccumulationPlugin, GradScalerKwargs
from torch import nn

from accelerate_sshsdp import SSHSDPPlugin, engine_of
from sshsdp.spaces.space_format import BlockSpaceFormat
from tests.accelerate.models import LENGTH, VOCABULARY, Pair, llama, loader, make
from tests.accelerate.training import new_accelerator, train
from tests.support.compare import assert_rounds_alike

if TYPE_CHECKING:
    from tests.accelerate.conftest import Ranks


def _assert_trains_like_ddp(
    kind: str,
    options: dict[str, Any],
    plugin: dict[str, Any] | None = None,
    frozen: tuple[str, ...] = (),
) -> None:
    theirs = train(new_accelerator("ddp", **options), kind, frozen=frozen)
    accelerator = new_accelerator("ours", sshsdp_plugin=SSHSDPPlugin(**plugin or {}), **options)
    ours = train(accelerator, kind, frozen=frozen)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-4)
    assert ours.rates == theirs.rates
    assert len(set(ours.rates)) > 1
    if not accelerator.is_main_process:
        assert ours.weights == {}
        return
    names = [name.removeprefix("module.") for name in theirs.weights]
    assert [*ours.weights] == names
    for name, value in zip(names, theirs.weights.values(), strict=True):
        if name.endswith(("key.bias", "k_proj.bias")):
            # Softmax makes their gradients zero but for rounding, which Adam scales up.
            continue
        torch.testing.assert_close(ours.weights[name].to(value.dtype), value, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "bert", "t5", "vit"])
def test_losses_norms_and_weights_equal_ddp(two_ranks: Ranks, kind: str) -> None:
    """Clipping, weight decay groups, a schedule made before `prepare`, an uneven last batch."""
    two_ranks.run(_assert_trains_like_ddp, kind, {})


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_accumulated_micro_batches_equal_ddp(two_ranks: Ranks, kind: str) -> None:
    """Four micro-batches an epoch, in steps of three: the last step has one of them."""
    two_ranks.run(_assert_trains_like_ddp, kind, {"gradient_accumulation_steps": 3})


def test_micro_batches_that_are_reduced_one_by_one_equal_ddp(two_ranks: Ranks) -> None:
    accumulation = GradientAccumulationPlugin(num_steps=3, sync_each_batch=True)
    two_ranks.run(_assert_trains_like_ddp, "llama", {"gradient_accumulation_plugin": accumulation})


def _norm_of_accumulated(precision: str, parts: int) -> float:
    scaling = GradScalerKwargs(init_scale=256.0)
    accelerator = new_accelerator(
        "ours",
        mixed_precision=precision,
        gradient_accumulation_steps=parts,
        kwargs_handlers=[scaling],
    )
    model = make("llama")
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    generator = torch.Generator().manual_seed(accelerator.process_index)
    batch = torch.randint(0, VOCABULARY, (4, LENGTH), generator=generator)
    for part in batch.chunk(parts):
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=part, labels=part).loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert norm is not None
    return norm.item()


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_micro_batches_give_the_gradient_of_one_batch(two_ranks: Ranks, precision: str) -> None:
    """Runs with accumulation collapsed in fp16: huggingface/accelerate#2866."""
    whole, parts = (two_ranks.run(_norm_of_accumulated, precision, n)[0] for n in (1, 4))
    assert parts == pytest.approx(whole, rel=1e-6 if precision == "no" else 2.0**-8)


def test_frozen_parts_equal_ddp(two_ranks: Ranks) -> None:
    two_ranks.run(_assert_trains_like_ddp, "t5", {}, None, ("encoder.block", "shared"))


def test_replicas_and_shards_equal_ddp(four_ranks: Ranks) -> None:
    plugin = {"replicate_size": 2, "packs": True, "reshard_after_forward": False}
    four_ranks.run(_assert_trains_like_ddp, "llama", {"gradient_accumulation_steps": 2}, plugin)


def _assert_bf16_rounds_like_ddp() -> None:
    full = train(new_accelerator("ddp"), "llama")
    theirs, ours = (
        train(new_accelerator(kind, mixed_precision="bf16"), "llama") for kind in ("ddp", "ours")
    )
    assert_rounds_alike(ours, theirs, full)


def test_bf16_is_as_close_to_ddp_as_rounding_allows(two_ranks: Ranks) -> None:
    two_ranks.run(_assert_bf16_rounds_like_ddp)


def _train_mxfp8(kind: str, precision: str) -> list[float]:
    accelerator = new_accelerator(kind, mixed_precision=precision)
    torch.manual_seed(0)
    model = llama(hidden_size=64, intermediate_size=64, num_hidden_layers=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    if kind == "ours":
        assert accelerator.mixed_precision == "bf16"
        engine = engine_of(model)
        formats = [slot.space.space_format for slot in engine.slots]
        assert sum(isinstance(one, BlockSpaceFormat) for one in formats) == 3 * 7
        assert {p.tensor.dtype for _, p in engine.update_parameters()} == {torch.float32}
    batch = torch.arange(2 * LENGTH).view(2, LENGTH) + accelerator.process_index
    losses = []
    for _ in range(6):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    return losses


def test_mxfp8_trains_nearly_as_bf16_does(two_ranks: Ranks) -> None:
    ours = two_ranks.run(_train_mxfp8, "ours", "mxfp8")[0]
    theirs = two_ranks.run(_train_mxfp8, "ddp", "bf16")[0]
    assert ours != theirs
    assert ours == pytest.approx(theirs, rel=0.03)
    assert ours[-1] < 0.9 * ours[0]


def _train_bf16_from_bf16_weights() -> None:
    accelerator = new_accelerator("ours", mixed_precision="bf16")
    torch.manual_seed(0)
    model = llama().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    model, optimizer = accelerator.prepare(model, optimizer)
    engine = engine_of(model)
    assert {p.tensor.dtype for _, p in engine.update_parameters()} == {torch.float32}
    batch = torch.randint(0, VOCABULARY, (2, LENGTH))
    output = model(input_ids=batch, labels=batch)
    # As Accelerate's own wrapper returns it.
    assert output.logits.dtype == torch.float32
    accelerator.backward(output.loss)
    before = {name: p.tensor.clone() for name, p in engine.update_parameters()}
    optimizer.step()
    # Steps this small would be lost in bf16.
    for name, parameter in engine.update_parameters():
        assert not torch.equal(parameter.tensor, before[name]), name


def test_a_model_loaded_in_bf16_gets_fp32_masters_under_mixed_precision(two_ranks: Ranks) -> None:
    """Accelerate's FSDP2 silently left them in bf16 (huggingface/accelerate#3979)."""
    two_ranks.run(_train_bf16_from_bf16_weights)


def _train_fp16_with_one_overflow() -> None:
    scaling = GradScalerKwargs(init_scale=1024.0, growth_interval=1000)
    accelerator = new_accelerator("ours", mixed_precision="fp16", kwargs_handlers=[scaling])
    model = make("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    engine = engine_of(model)
    generator = torch.Generator().manual_seed(accelerator.process_index)
    losses = []
    for index in range(4):
        batch = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)
        loss = model(input_ids=batch, labels=batch).loss
        # A single gradient overflows, on rank 1, and lies in the shard of one rank.
        overflows = index == 2 and accelerator.process_index == 1
        handle = model.model.norm.weight.register_hook(
            lambda grad, factor=float("inf") if overflows else 1.0: grad * factor
        )
        accelerator.backward(loss)
        handle.remove()
        if index == 2:
            bad = [not torch.isfinite(p.grad).all() for _, p in engine.update_parameters()]
            assert accelerator.gather(torch.tensor([any(bad)])).sum() == 1
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        assert bool(torch.isfinite(norm)) == (index != 2)
        before = {name: p.tensor.clone() for name, p in engine.update_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        changed = any(
            not torch.equal(p.tensor, before[name]) for name, p in engine.update_parameters()
        )
        assert changed == (index != 2)
        assert accelerator.optimizer_step_was_skipped == (index == 2)
        losses.append(loss.item())
    assert accelerator.scaler.get_scale() == 512.0
    assert all(loss < 10 for loss in losses)


def test_fp16_skips_a_step_on_all_ranks_if_one_overflows(two_ranks: Ranks) -> None:
    two_ranks.run(_train_fp16_with_one_overflow)


def _distil(kind: str) -> list[float]:
    accelerator = new_accelerator(kind, gradient_accumulation_steps=2)
    teacher = make("llama", seed=1).requires_grad_(False).eval()
    model = make("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    teacher = accelerator.prepare_model(teacher, evaluation_mode=True)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader("llama"))
    losses = []
    for batch in batches:
        with accelerator.accumulate(model):
            with torch.no_grad():
                target = teacher(**batch).logits
            loss = (model(**batch).logits - target).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    return losses


def _play_against_each_other(kind: str) -> list[float]:
    accelerator = new_accelerator(kind)
    torch.manual_seed(0)
    generator, critic = Pair(), nn.Sequential(Pair(), nn.Linear(6, 1))
    steps = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in (generator, critic)]
    generator, critic, generator_step, critic_step = accelerator.prepare(generator, critic, *steps)
    numbers = torch.Generator().manual_seed(accelerator.process_index)
    losses = []
    for _ in range(4):
        real, noise = torch.randn(2, 4, 6, generator=numbers)
        fake = generator(noise)
        # Two forwards of the critic before its backward.
        critic_loss = (critic(fake.detach()) - critic(real)).mean() + critic(real).square().mean()
        accelerator.backward(critic_loss)
        accelerator.clip_grad_norm_(critic.parameters(), 0.1)
        critic_step.step()
        critic_step.zero_grad()
        # The critic's gradients of this backward are not wanted.
        loss = -critic(fake).mean()
        accelerator.backward(loss)
        generator_step.step()
        generator_step.zero_grad()
        critic_step.zero_grad()
        both = torch.stack([critic_loss.detach(), loss.detach()])
        losses += accelerator.reduce(both, "mean").tolist()
    return losses


@pytest.mark.parametrize("train_both", [_distil, _play_against_each_other])
def test_two_models_equal_ddp(two_ranks: Ranks, train_both: Any) -> None:
    """A frozen teacher; a critic that is run three times and passes gradients on."""
    ours, theirs = (two_ranks.run(train_both, kind)[0] for kind in ("ours", "ddp"))
    assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-7)
