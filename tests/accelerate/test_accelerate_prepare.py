"""`prepare` in any order and grouping, and everything that can go wrong with it."""

from __future__ import annotations

import itertools
import logging
import os
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from accelerate.state import PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
from torch import nn

from accelerate_sshsdp import Accelerator, SSHSDPPlugin, engine_of
from tests.accelerate.models import Pair, llama, make
from tests.accelerate.training import new_accelerator

if TYPE_CHECKING:
    from tests.accelerate.conftest import Ranks


def _two_steps(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> float:
    generator = torch.Generator().manual_seed(accelerator.process_index)
    for _ in range(2):
        loss = model(torch.randn(4, 6, generator=generator)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def _pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Pair()
    return model, torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.2)


def _prepare_in_many_ways() -> None:
    losses = []
    for way in ("together", "optimizer first", "apart", "apart, optimizer first", "afterwards"):
        accelerator = new_accelerator("ours")
        model, optimizer = _pair()
        inner = optimizer
        if way == "together":
            prepared, optimizer = accelerator.prepare(model, optimizer)
        elif way == "optimizer first":
            optimizer, prepared = accelerator.prepare(optimizer, model)
        elif way == "apart":
            prepared = accelerator.prepare_model(model)
            optimizer = accelerator.prepare_optimizer(optimizer)
        elif way == "apart, optimizer first":
            optimizer = accelerator.prepare(optimizer)
            prepared = accelerator.prepare(model)
        else:
            prepared = accelerator.prepare(model)
            inner = torch.optim.Adagrad(
                prepared.parameters(), lr=0.1, initial_accumulator_value=0.2
            )
            optimizer = accelerator.prepare(inner)
        assert prepared is model
        assert optimizer.optimizer is inner
        assert accelerator.unwrap_model(prepared) is model
        losses.append(_two_steps(accelerator, prepared, optimizer))
    assert len(set(losses)) == 1, losses


def test_models_and_optimizers_may_be_prepared_in_any_order_and_grouping(two_ranks: Ranks) -> None:
    """Optimizers were made anew (huggingface/accelerate#1902), or lost state that they make at once
    (huggingface/accelerate#3855).
    """
    two_ranks.run(_prepare_in_many_ways)


def _train_two_models() -> None:
    accelerator = new_accelerator("ours", gradient_accumulation_steps=2)
    (a, a_optimizer), (b, b_optimizer) = _pair(), _pair()
    a, b, a_optimizer, b_optimizer = accelerator.prepare(a, b, a_optimizer, b_optimizer)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(accelerator.process_index))
    with accelerator.accumulate(a, b):
        accelerator.backward(a(b(x)).sum())
        assert not accelerator.sync_gradients
        everything = itertools.chain(a.parameters(), b.parameters())
        assert accelerator.clip_grad_norm_(everything, 1.0) is None
    with accelerator.accumulate(a, b):
        accelerator.backward(a(b(x)).sum())
    assert accelerator.sync_gradients
    norms = [engine.clip_grad_norm_(float("inf")) for engine in accelerator.engines]
    both = accelerator.clip_grad_norm_(itertools.chain(a.parameters(), b.parameters()), 0.25)
    assert type(both) is torch.Tensor
    torch.testing.assert_close(both, torch.linalg.vector_norm(torch.stack(norms)))
    clipped = [engine.clip_grad_norm_(float("inf")) for engine in accelerator.engines]
    torch.testing.assert_close(torch.linalg.vector_norm(torch.stack(clipped)), torch.tensor(0.25))

    accelerator.clip_grad_value_(a.parameters(), 2.0**-10)
    grads = [p.grad for _, p in engine_of(a).update_parameters() if p.grad is not None]
    assert max(grad.abs().max().item() for grad in grads) == 2.0**-10
    assert engine_of(b).clip_grad_norm_(float("inf")) == clipped[1]


def test_several_models_accumulate_and_clip_together(two_ranks: Ranks) -> None:
    """`no_sync` was missing, or knew no lists: huggingface/accelerate#3762."""
    two_ranks.run(_train_two_models)


def _count_reductions() -> None:
    accelerator = new_accelerator("ours", gradient_accumulation_steps=3)
    model, optimizer = accelerator.prepare(*_pair())
    engine = engine_of(model)
    counts = []
    for _ in range(6):
        with accelerator.accumulate(model):
            loss = model(torch.ones(1, 6)).sum()
            with engine.record_collectives() as records:
                accelerator.backward(loss)
            counts.append(sum(one.kind == "reduce_scatter" for one in records))
            optimizer.step()
            optimizer.zero_grad()
    assert counts == [0, 0, len(engine.units) - 1] * 2


def test_gradients_are_reduced_with_the_last_micro_batch_alone(two_ranks: Ranks) -> None:
    two_ranks.run(_count_reductions)


def _unwrap() -> None:
    accelerator = new_accelerator("ours", mixed_precision="bf16")
    model = accelerator.prepare(make("llama"))
    tokens = torch.ones(1, 3, dtype=torch.long)
    with torch.no_grad():
        assert model(input_ids=tokens).logits.dtype == torch.float32
        plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        assert plain is model
        # Neither autocast nor a conversion of what comes out.
        assert plain(input_ids=tokens).logits.dtype == torch.bfloat16


def test_an_unwrapped_model_runs_without_accelerates_wrapper(two_ranks: Ranks) -> None:
    two_ranks.run(_unwrap)


def _sync_in_backward() -> None:
    accelerator = new_accelerator("ours")
    model, _ = accelerator.prepare(*_pair())
    with accelerator.no_sync(model):
        first, second = model(torch.ones(1, 6)).sum(), model(torch.ones(1, 6)).sum()
        accelerator.backward(first)
        assert all(p.grad is None for _, p in engine_of(model).update_parameters())
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(second)
    assert any(p.grad is not None for _, p in engine_of(model).update_parameters())


def test_a_backward_may_be_made_to_reduce_within_no_sync(two_ranks: Ranks) -> None:
    two_ranks.run(_sync_in_backward)


def _evaluate_then_train() -> None:
    accelerator = new_accelerator("ours", mixed_precision="bf16")
    model, _ = _pair()
    model = accelerator.prepare_model(model, evaluation_mode=True)
    with torch.no_grad():
        before = model(torch.ones(1, 6))
    assert before.dtype == torch.float32
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert len(accelerator.engines) == 1
    _two_steps(accelerator, model, optimizer)
    model.eval()
    with torch.no_grad():
        assert not torch.equal(model(torch.ones(1, 6)), before)


def test_a_model_prepared_for_evaluation_can_be_trained_later(two_ranks: Ranks) -> None:
    """A forward before the optimizer was made kept it from training: pytorch/pytorch#149205."""
    two_ranks.run(_evaluate_then_train)


def _train_again_after_free_memory() -> None:
    accelerator = new_accelerator("ours")
    model, optimizer = _pair()
    kept = model
    model, optimizer = accelerator.prepare(model, optimizer)
    first = _two_steps(accelerator, model, optimizer)
    accelerator.backward(model(torch.ones(1, 6)).sum())
    model, optimizer = accelerator.free_memory(model, optimizer)
    assert model is None
    assert optimizer is None
    assert not accelerator._models
    assert all(p.grad is None for _, p in engine_of(kept).update_parameters())
    # As `find_executable_batch_size` does: the same model, with a new optimizer.
    model, optimizer = accelerator.prepare(kept, torch.optim.SGD(kept.parameters(), lr=0.1))
    assert model is kept
    assert _two_steps(accelerator, model, optimizer) < first


def test_free_memory_leaves_a_model_that_can_be_prepared_again(two_ranks: Ranks) -> None:
    """`auto_find_batch_size` wrapped a wrapped model (huggingface/transformers#34113)."""
    two_ranks.run(_train_again_after_free_memory)


def _collectives() -> None:
    accelerator = new_accelerator("ours")
    rank = accelerator.process_index
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(7), batch_size=2))
    seen = [accelerator.gather_for_metrics(batch) for batch in loader]
    assert torch.cat(seen).tolist() == [*range(7)]
    assert accelerator.reduce(torch.tensor(rank + 1.0)).item() == 3.0
    padded = accelerator.pad_across_processes(torch.ones(rank + 1), dim=0)
    assert padded.tolist() == ([1.0, 0.0] if rank == 0 else [1.0, 1.0])
    with accelerator.join_uneven_inputs([None]):
        pass
    with (
        pytest.raises(ValueError, match="keep even_batches=True"),
        accelerator.join_uneven_inputs([None], even_batches=False),
    ):
        pass


def test_data_and_results_are_spread_and_gathered_over_all_ranks(two_ranks: Ranks) -> None:
    two_ranks.run(_collectives)


def _generate() -> None:
    accelerator = new_accelerator("ours")
    whole = make("llama")
    prompt = torch.tensor([[5, 6, 7]]) + accelerator.process_index
    # Another length on each rank.
    options = {"max_new_tokens": 3 + 4 * accelerator.process_index, "do_sample": False}
    expected = whole.generate(prompt, eos_token_id=None, **options)
    model = accelerator.prepare(make("llama"))
    # Without a context, all ranks go on until the last one is done.
    assert torch.equal(model.generate(prompt, eos_token_id=None, **options), expected)
    with accelerator.unsharded(model):
        if accelerator.is_main_process:
            assert torch.equal(model.generate(prompt, eos_token_id=None, **options), expected)


def test_generate_works_for_ranks_with_texts_of_different_length(two_ranks: Ranks) -> None:
    """It timed out under FSDP (huggingface/trl#1726)."""
    two_ranks.run(_generate)


def _compile_and_checkpoint_units() -> None:
    losses = []
    for plugin, backend in ((False, "no"), (True, "no"), (False, "eager")):
        accelerator = new_accelerator(
            "ours",
            sshsdp_plugin=SSHSDPPlugin(activation_checkpointing=plugin),
            dynamo_backend=backend,
        )
        model, optimizer = accelerator.prepare(*_pair())
        assert (model.layers[0]._compiled_call_impl is not None) == (backend != "no")
        losses.append(_two_steps(accelerator, model, optimizer))
    assert losses[1:] == pytest.approx([losses[0]] * 2)
    model = torch.compile(_pair()[0], backend="eager")
    with pytest.raises(RuntimeError, match="prepare the plain model, and set Accelerator"):
        accelerator.prepare(model)


def test_units_are_compiled_and_recomputed_one_by_one(two_ranks: Ranks) -> None:
    two_ranks.run(_compile_and_checkpoint_units)


def _train_alone() -> None:
    import torch.distributed as dist

    dist.destroy_process_group()
    without = {name: "" for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    with patch.dict(os.environ):
        for name in without:
            del os.environ[name]
        accelerator = new_accelerator("ours")
        model, optimizer = accelerator.prepare(*_pair())
        assert _two_steps(accelerator, model, optimizer) > 0
        assert (accelerator.num_processes, str(accelerator.device)) == (1, "cpu")


def test_one_process_trains_without_a_launcher(one_rank: Ranks) -> None:
    one_rank.run(_train_alone)


# Mistakes


def _mistakes() -> None:
    accelerator = new_accelerator("ours")
    (a, _), (b, _) = _pair(), _pair()
    a, b = accelerator.prepare(a, b)
    both = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)
    with pytest.raises(ValueError, match=r"SGD holds parameters of Pair and Pair.*one nn.Module"):
        accelerator.prepare(both)
    accelerator._optimizers.clear()
    with pytest.raises(RuntimeError, match="no optimizer of Pair has been prepared"):
        accelerator.clip_grad_norm_(a.parameters(), 1.0)
    with pytest.raises(ValueError, match="LBFGS cannot train a sharded model"):
        accelerator.prepare(torch.optim.LBFGS(a.parameters()))
    accelerator._optimizers.clear()
    optimizer = accelerator.prepare(torch.optim.Adam(a.parameters()))
    with pytest.raises(ValueError, match="must be given all parameters of the model"):
        accelerator.clip_grad_norm_(a.layers[0].parameters(), 1.0)
    with pytest.raises(RuntimeError, match=r"use accelerator.save_state\(\)"):
        optimizer.state_dict()
    with pytest.raises(ValueError, match="no module of class 'Block'; it has Pair, ModuleList"):
        new_accelerator("ours", sshsdp_plugin=SSHSDPPlugin(units="Block")).prepare(_pair()[0])
    with pytest.raises(ValueError, match=r"2 x 2 ranks, but there are 2: their product"):
        new_accelerator("ours", sshsdp_plugin=SSHSDPPlugin(replicate_size=2, shard_size=2)).prepare(
            _pair()[0]
        )


def test_mistakes_with_models_and_optimizers_are_named(two_ranks: Ranks) -> None:
    """A class name of another model could not be found, and which there are was not said.

    tatsu-lab/stanford_alpaca#58, hiyouga/LlamaFactory#8279.
    """
    two_ranks.run(_mistakes)


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _warnings() -> list[str]:
    messages = _Messages()
    logger = logging.getLogger("accelerate_sshsdp")
    logger.addHandler(messages)
    logger.setLevel(logging.INFO)
    accelerator = new_accelerator("ours", mixed_precision="bf16")
    accelerator.prepare(nn.Linear(3, 3))
    accelerator.prepare(llama())
    forgotten = nn.Linear(2, 2)
    optimizer = accelerator.prepare(torch.optim.SGD(forgotten.parameters(), lr=0.1))
    for _ in range(2):
        forgotten(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    logger.removeHandler(messages)
    return messages.texts


def test_what_saves_no_memory_or_averages_no_gradients_is_said(two_ranks: Ranks) -> None:
    """Only the root was wrapped, in silence, where no rule fits: huggingface/lerobot#4010."""
    main, other = two_ranks.run(_warnings)
    assert any(text.startswith("Linear has no units") for text in main)
    assert any("LlamaForCausalLM: 3 units" in text and "torch.float32" in text for text in main)
    assert sum("SGD trains parameters of no prepared model" in text for text in main) == 1
    assert len(other) == 1


def _state_made_without_cpu() -> None:
    if PartialState().num_processes == 2:
        # Earlier versions of Accelerate (1.10) notice the other process.
        assert Accelerator().num_processes == 2
        return
    with pytest.raises(RuntimeError, match=r"speaks of 2 processes .* make the accelerator first"):
        Accelerator()


def test_processes_that_would_each_train_alone_are_stopped(two_ranks: Ranks) -> None:
    two_ranks.run(_state_made_without_cpu)


@pytest.mark.parametrize(
    ("options", "variables", "words"),
    [
        ({"fsdp_plugin": FullyShardedDataParallelPlugin()}, {}, "cannot use FSDP as well"),
        ({"deepspeed_plugin": object()}, {}, "cannot use DeepSpeed as well"),
        ({"megatron_lm_plugin": object()}, {}, "cannot use Megatron-LM as well"),
        ({}, {"ACCELERATE_USE_FSDP": "true"}, "the environment asks for FSDP"),
        ({}, {"ACCELERATE_USE_DEEPSPEED": "true"}, "the environment asks for DeepSpeed"),
        ({}, {"ACCELERATE_USE_MEGATRON_LM": "true"}, "the environment asks for Megatron-LM"),
        ({"mixed_precision": "int8"}, {}, "there is no such precision. Choose one of no, fp16"),
        ({}, {"ACCELERATE_MIXED_PRECISION": "fp8"}, "mxfp8 is the closest"),
        ({"parallelism_config": ParallelismConfig(tp_size=2)}, {}, "must have tp_size=1, got 2"),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(
    options: dict[str, Any], variables: dict[str, str], words: str
) -> None:
    with patch.dict(os.environ, variables), pytest.raises(ValueError, match=words):
        Accelerator(**options)
