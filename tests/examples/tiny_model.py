"""A model directory that is small enough to train in seconds, and a text that it can learn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from pathlib import Path

_LINES = (
    "In the beginning was the word, and the word was with the parameter.",
    "And the optimizer said, Let there be gradients: and there were gradients.",
    "And the ranks gathered what they had, and freed it again, and saw that it was good.",
)


def write_text(path: Path) -> None:
    """Write some kilobytes that repeat themselves, with numbers so that no two lines are equal."""
    lines = (f"{number}. {_LINES[number % len(_LINES)]}" for number in range(600))
    path.write_text("\n".join(lines), encoding="utf-8")


def write_model(directory: Path, text: str) -> None:
    """Write a Llama of two layers with tied embeddings, and a tokenizer trained on ``text``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [text],
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=["<end>"],
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>"
    ).save_pretrained(directory)
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=0,
        )
    ).save_pretrained(directory)
