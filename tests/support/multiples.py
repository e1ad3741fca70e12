"""Subjects for MXFP8: linear layers with sides that are multiples of 32, and some without."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from tests.support.subject import Subject
from tests.support.zoo import Decoder, next_token_loss, random_tokens, without_fp32_norms

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MULTIPLES"]

VOCABULARY = 31


class OddBlock(nn.Module):
    """Sides of 32, 96 and 160, one layer that stays dense and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(96)
        self.up = nn.Linear(96, 160)
        self.dense = nn.Linear(160, 100)
        self.back = nn.Linear(100, 160, bias=False)
        self.down = nn.Linear(160, 96)
        self.low = nn.Linear(96, 32, bias=False)
        self.high = nn.Linear(32, 96, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.gelu(self.up(self.norm(x)))
        hidden = hidden + self.back(torch.tanh(self.dense(hidden)))
        x = x + self.down(hidden)
        return x + self.high(self.low(self.high(self.low(x))))


class Odd(nn.Module):
    """Blocks of odd sizes between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 96)
        self.blocks = nn.ModuleList(OddBlock() for _ in range(3))
        self.head = nn.Linear(96, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class WideBlock(nn.Module):
    """A matrix of one row of blocks, which only a transposed layout can cut."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(256, 32)
        self.high = nn.Linear(32, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.high(torch.tanh(self.low(x)))


class Wide(nn.Module):
    """Two of them between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 256)
        self.blocks = nn.ModuleList(WideBlock() for _ in range(2))
        self.head = nn.Linear(256, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Experts(nn.Module):
    """Packed experts, each token sent to one; with ``linear`` for every expert, or grouped."""

    def __init__(self, width: int, hidden: int, num_experts: int, grouped: bool) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts, bias=False)
        self.up = nn.Parameter(0.1 * torch.randn(num_experts, hidden, width))
        self.down = nn.Parameter(0.1 * torch.randn(num_experts, width, hidden))
        self.grouped = grouped
        self.linear: Callable[..., torch.Tensor] = functional.linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        ends = torch.bincount(chosen, minlength=len(self.up)).cumsum(0).int()
        if self.grouped and self.linear is functional.linear:
            hidden = functional.grouped_mm(tokens[order], self.up.mT, offs=ends)
            hidden = functional.gelu(hidden)
            output = functional.grouped_mm(hidden, self.down.transpose(-2, -1), offs=ends)
        else:
            parts = tokens[order].tensor_split(ends[:-1].tolist())
            done = []
            for index, part in enumerate(parts):
                if len(part):
                    hidden = functional.gelu(self.linear(part, self.up[index]))
                    done.append(self.linear(hidden, self.down[index]))
            output = torch.cat(done)
        return x + (output[order.argsort()] * weights[:, None]).view(x.shape)


class Mixture(nn.Module):
    """A norm in front of packed experts, three of which are seldom chosen."""

    def __init__(self, grouped: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), Experts(64, 96, 4, grouped)) for _ in range(2)
        )
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        use_cache=False,
    )
    return without_fp32_norms(LlamaForCausalLM(config))


MULTIPLES = [
    Subject("decoder of 64", lambda: Decoder(width=64), random_tokens, next_token_loss),
    Subject("llama of 64", build_llama, random_tokens, next_token_loss),
    Subject("odd multiples", Odd, random_tokens, next_token_loss),
    Subject("wide", Wide, random_tokens, next_token_loss),
    Subject("experts one by one", lambda: Mixture(False), random_tokens, next_token_loss),
    Subject("grouped experts", lambda: Mixture(True), random_tokens, next_token_loss),
]
