"""Small models of the Hugging Face kinds, with data, all made from configurations."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

VOCABULARY, LENGTH = 61, 12


def llama(**changes: Any) -> LlamaForCausalLM:
    """A decoder with tied embeddings and grouped queries."""
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**{**fields, **changes}))


def bert() -> BertForMaskedLM:
    """An encoder with a tied head, without dropout, whose pooler is not used."""
    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def t5() -> T5ForConditionalGeneration:
    """An encoder and a decoder that share their embedding."""
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=24,
            d_kv=12,
            d_ff=40,
            num_layers=2,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


def vit() -> ViTForImageClassification:
    """An image classifier."""
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=8,
            patch_size=4,
            num_labels=5,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


MODELS = {"llama": llama, "bert": bert, "t5": t5, "vit": vit}


def make(kind: str, seed: int = 0) -> nn.Module:
    """The model of a kind, the same on every rank."""
    torch.manual_seed(seed)
    return MODELS[kind]()


def dataset(kind: str, size: int = 30) -> list[dict[str, torch.Tensor]]:
    """Samples for a kind of model."""
    generator = torch.Generator().manual_seed(5)
    if kind == "vit":
        pixels = torch.randn(size, 3, 8, 8, generator=generator)
        labels = torch.randint(0, 5, (size,), generator=generator)
        return [
            {"pixel_values": p, "labels": label} for p, label in zip(pixels, labels, strict=False)
        ]
    tokens = torch.randint(3, VOCABULARY, (size, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def loader(kind: str, size: int = 30, batch_size: int = 4) -> DataLoader[Any]:
    """Shuffled batches, the last of which is smaller."""
    generator = torch.Generator().manual_seed(7)
    return DataLoader(dataset(kind, size), batch_size, shuffle=True, generator=generator)


class Pair(nn.Module):
    """Two linear layers in a list, for tests that need no transformer."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x
