"""Models loaded into shards equal those that transformers loads whole."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import sshsdp

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FP32 = sshsdp.RuntimePolicy(dtype=torch.float32)
VOCABULARY = 67


def llama(*, tied: bool = False) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )


def bert() -> transformers.BertConfig:
    return transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
    )


def t5() -> transformers.T5Config:
    return transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=24,
        d_ff=40,
        d_kv=6,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )


def mixtral() -> transformers.MixtralConfig:
    return transformers.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=2,
    )


MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (transformers.LlamaForCausalLM, llama()),
    "tied": (transformers.LlamaForCausalLM, llama(tied=True)),
    "bert": (transformers.BertForMaskedLM, bert()),
    "t5": (transformers.T5ForConditionalGeneration, t5()),
    "mixtral": (transformers.MixtralForCausalLM, mixtral()),
}


def save(folder: Path, kind: str, **options: Any) -> Path:
    torch.manual_seed(3)
    cls, config = MODELS[kind]
    model = cls(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(folder / kind, **options)
    return folder / kind


def assert_equal(model: nn.Module, engine: sshsdp.Engine, plain: nn.Module) -> None:
    with engine.unsharded():
        found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        expected = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
        assert list(found) == list(expected)
        for name, value in expected.items():
            assert torch.equal(found[name].to(value.dtype), value), name
    masters = engine.full_state_dict(rank0_only=False)
    for name, value in plain.state_dict().items():
        assert torch.equal(masters[name], value), name


def loss_of(model: Any) -> torch.Tensor:
    tokens = torch.arange(24).reshape(2, 12) * 5 % VOCABULARY
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def step(model: Any, engine: sshsdp.Engine) -> tuple[float, dict[str, torch.Tensor]]:
    optimizer = engine.attach(torch.optim.AdamW(model.parameters(), lr=1e-2))
    loss = loss_of(model)
    loss.backward()
    optimizer.step()
    return loss.item(), engine.full_state_dict(rank0_only=False)


def load_and_compare(folder: Path, kind: str) -> None:
    cls = MODELS[kind][0]
    plain = cls.from_pretrained(folder)
    model, engine = sshsdp.from_pretrained(cls, folder, runtime=FP32)
    assert not model.training
    assert_equal(model, engine, plain)
    with engine.unsharded():
        assert torch.equal(loss_of(model), loss_of(plain))
    loss, weights = step(model, engine)
    other, expected = step(plain, sshsdp.shard(plain, runtime=FP32))
    assert loss == other
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name


@pytest.mark.parametrize("kind", ["llama", "tied", "bert", "t5"])
@pytest.mark.parametrize("shard_size", ["1GB", "6KB"])
def test_values_and_a_step_equal_an_ordinary_load(
    workers: Callable[[int], Any], tmp_path: Path, kind: str, shard_size: str
) -> None:
    """Buffers were lost and weights random: huggingface/accelerate#3921, pytorch/pytorch#105840."""
    folder = save(tmp_path, kind, max_shard_size=shard_size)
    assert (folder / "model.safetensors").exists() == (shard_size == "1GB")
    workers(2).run(load_and_compare, folder, kind)


def load_bf16(folder: Path) -> None:
    cls = MODELS["llama"][0]
    policies = {
        "runtime": sshsdp.RuntimePolicy(dtype=torch.bfloat16),
        "update": sshsdp.UpdatePolicy(dtype=torch.bfloat16),
    }
    model, engine = sshsdp.from_pretrained(cls, folder, **policies)
    plain = cls.from_pretrained(folder, dtype=torch.bfloat16)
    masters = engine.full_state_dict(rank0_only=False)
    for name, value in plain.state_dict().items():
        assert masters[name].dtype == torch.bfloat16
        assert torch.equal(masters[name], value), name
    assert torch.equal(model.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)


def test_values_are_converted_as_they_are_read(
    workers: Callable[[int], Any], tmp_path: Path
) -> None:
    workers(2).run(load_bf16, save(tmp_path, "llama"))


# Checkpoints that do not fit the model


def change(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    tensors: dict[str, Any] = {**load_file(folder / "model.safetensors"), **changes}
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def load_changed(folder: Path) -> tuple[list[str], dict[str, torch.Tensor]]:
    messages = Messages()
    logger = logging.getLogger("sshsdp.pretrained")
    logger.addHandler(messages)
    cls = MODELS["llama"][0]
    torch.manual_seed(torch.distributed.get_rank())
    _, engine = sshsdp.from_pretrained(cls, folder, runtime=FP32)
    logger.removeHandler(messages)
    masters = engine.full_state_dict(rank0_only=False)
    for name, value in load_file(folder / "model.safetensors").items():
        assert name not in masters or torch.equal(masters[name], value), name
    return messages.texts, masters


def test_missing_keys_are_initialised_and_reported_with_unexpected_ones(
    workers: Callable[[int], Any], tmp_path: Path
) -> None:
    folder = save(tmp_path, "llama")
    norm, weight = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
    change(folder, {norm: None, weight: None, "other.weight": torch.zeros(2)})
    (texts, masters), (other_texts, others) = workers(2).run(load_changed, folder)
    assert len(texts) == 2
    assert "missing" in texts[0]
    assert norm in texts[0]
    assert weight in texts[0]
    assert "unexpected" in texts[1]
    assert "other.weight" in texts[1]
    assert not other_texts
    assert torch.equal(masters[norm], torch.ones(24))
    # One rank's draw, of the config's standard deviation.
    assert torch.equal(masters[weight], others[weight])
    assert 0.017 < masters[weight].std().item() < 0.023


def refuse(folder: Path, kind: str) -> str:
    with pytest.raises(ValueError, match="from_pretrained") as caught:
        sshsdp.from_pretrained(MODELS[kind][0], folder, runtime=FP32)
    return str(caught.value)


def test_a_shape_that_differs_is_named_with_the_file(
    workers: Callable[[int], Any], tmp_path: Path
) -> None:
    folder = save(tmp_path, "llama")
    name = "model.layers.0.mlp.up_proj.weight"
    change(folder, {name: torch.zeros(41, 24)})
    for message in workers(2).run(refuse, folder, "llama"):
        for part in (name, "(40, 24)", "(41, 24)", str(folder / "model.safetensors")):
            assert part in message


def refuse_then_shard(folder: Path) -> None:
    message = refuse(folder, "mixtral")
    assert "MixtralForCausalLM.from_pretrained()" in message
    assert "sshsdp.shard" in message
    model, plain = (transformers.MixtralForCausalLM.from_pretrained(folder) for _ in range(2))
    assert_equal(model, sshsdp.shard(model, runtime=FP32), plain)


def test_a_checkpoint_that_must_be_converted_is_loaded_whole(
    workers: Callable[[int], Any], tmp_path: Path
) -> None:
    workers(2).run(refuse_then_shard, save(tmp_path, "mixtral"))


def load_base(folder: Path) -> None:
    plain = transformers.BertModel.from_pretrained(folder, add_pooling_layer=False)
    loaded = sshsdp.from_pretrained(
        transformers.BertModel, folder, runtime=FP32, add_pooling_layer=False
    )
    assert_equal(*loaded, plain)


def test_a_base_model_is_read_out_of_one_with_a_head(
    workers: Callable[[int], Any], tmp_path: Path
) -> None:
    workers(2).run(load_base, save(tmp_path, "bert"))


def load_on_four(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    cls = MODELS["tied"][0]
    loaded = sshsdp.from_pretrained(
        transformers.AutoModelForCausalLM, folder, mesh=mesh, runtime=FP32
    )
    assert type(loaded[0]) is cls
    assert_equal(*loaded, cls.from_pretrained(folder))


def test_an_auto_class_loads_on_replicas_of_shards(
    workers: Callable[[int], Any], tmp_path: Path
) -> None:
    workers(4).run(load_on_four, save(tmp_path, "tied"))


def test_a_load_before_the_process_group_is_refused(tmp_path: Path) -> None:
    """Every rank trained on random weights: huggingface/transformers#25686."""
    with pytest.raises(RuntimeError, match="needs a process group"):
        sshsdp.from_pretrained(MODELS["llama"][0], save(tmp_path, "llama"))


def lack_files(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match="neither model"):
        sshsdp.from_pretrained(MODELS["llama"][0], folder)


def test_a_directory_without_files_is_named(workers: Callable[[int], Any], tmp_path: Path) -> None:
    workers(2).run(lack_files, tmp_path)
