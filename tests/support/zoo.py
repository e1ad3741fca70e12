"""The main subjects, all tiny: a decoder with tied embeddings, Llama, BERT, a convolutional net."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.support.subject import Subject, widened

__all__ = ["SUBJECTS", "Decoder", "next_token_loss", "without_fp32_norms"]

VOCABULARY, LENGTH, BATCH = 31, 6, 2


class Attention(nn.Module):
    """Causal self-attention with one projection for queries, keys and values."""

    def __init__(self, width: int, num_heads: int = 2) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class DecoderBlock(nn.Module):
    """Attention and a feed-forward layer; may checkpoint each of the two from within."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.use_reentrant: bool | None = None

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(self.norm2(x))))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(self.norm1(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + maybe_checkpoint(self.attend, x, self.use_reentrant)
        return x + maybe_checkpoint(self.feed_forward, x, self.use_reentrant)


class Decoder(nn.Module):
    """A decoder-only transformer whose head is the embedding."""

    def __init__(
        self, width: int = 16, depth: int = 3, vocabulary: int = VOCABULARY, length: int = LENGTH
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.1 * torch.randn(length, width))
        self.blocks = nn.ModuleList(DecoderBlock(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.use_reentrant: bool | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = maybe_checkpoint(block, x, self.use_reentrant)
        return self.head(self.norm(x))

    def checkpoint_activations(self, *, where: str, use_reentrant: bool) -> None:
        """Recompute activations in backward: of the blocks' parts, or of whole blocks.

        Args:
            where: ``"inside"`` or ``"around"`` the blocks, which are the units.
            use_reentrant: As in ``torch.utils.checkpoint``.
        """
        for module in self.blocks if where == "inside" else [self]:
            module.use_reentrant = use_reentrant


def maybe_checkpoint(function: Any, x: torch.Tensor, use_reentrant: bool | None) -> torch.Tensor:
    if use_reentrant is None:
        return function(x)
    return checkpoint(function, x, use_reentrant=use_reentrant)


class ConvNet(nn.Module):
    """Convolutions with both kinds of normalisation and in-place activations."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            [
                nn.Sequential(
                    nn.Conv2d(3, 6, 3, padding=1, bias=False),
                    nn.BatchNorm2d(6),
                    nn.ReLU(inplace=True),
                ),
                nn.Sequential(
                    nn.Conv2d(6, 10, 3, stride=2), nn.GroupNorm(2, 10), nn.ReLU(inplace=True)
                ),
            ]
        )
        self.classifier = nn.Linear(10, 7)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            images = stage(images)
        return self.classifier(images.mean((2, 3)))


def random_tokens(generator: torch.Generator, rank: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)


def next_token_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    output = model(tokens[:, :-1])
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return functional.cross_entropy(widened(logits.flatten(0, 1)), tokens[:, 1:].flatten())


def build_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        use_cache=False,
    )
    return without_fp32_norms(LlamaForCausalLM(config))


def without_fp32_norms(model: nn.Module) -> nn.Module:
    """Have norms compute in float64 where the model is in it; transformers' always take float32."""
    if torch.get_default_dtype() == torch.float64:
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        for name, module in list(model.named_modules()):
            if isinstance(module, LlamaRMSNorm):
                norm = nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon)
                model.set_submodule(name, norm)
    return model


def build_bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertModel(config)
    for name, parameter in model.named_parameters():
        if name.endswith("key.bias"):
            # Attention does not depend on it: its gradient is rounding noise, and Adam would step.
            parameter.requires_grad_(False)
    return model


def bert_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(tokens)
    mask[0, -2:] = 0
    output = model(input_ids=tokens, attention_mask=mask)
    return widened(output.last_hidden_state).pow(3).mean() + widened(output.pooler_output).mean()


def random_images(generator: torch.Generator, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.randn(4, 3, 8, 8, generator=generator)
    return images, torch.randint(0, 7, (4,), generator=generator)


def image_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    return functional.cross_entropy(widened(model(images)), labels)


SUBJECTS = [
    Subject("decoder", Decoder, random_tokens, next_token_loss),
    Subject("llama", build_llama, random_tokens, next_token_loss),
    Subject("bert", build_bert, random_tokens, bert_loss, ("encoder.layer.?",)),
    Subject("convolutions", ConvNet, random_images, image_loss),
]
