"""What the fine-tuning examples share: optimizer, learning rate, export and its check."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from torch import Tensor, nn


def make_adamw(
    parameters: Iterable[nn.Parameter], learning_rate: float, fused: bool
) -> torch.optim.AdamW:
    """AdamW, without weight decay on norms and biases."""
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=fused)


def make_schedule(
    optimizer: torch.optim.Optimizer, warmup: int, total: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """A warm-up, then a cosine down to a tenth; both in optimizer steps."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        progressed = min(1.0, (step - warmup) / max(1, total - warmup))
        return 0.1 + 0.9 * (1.0 + math.cos(math.pi * progressed)) / 2.0

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def write_export(
    model: Any, weights: Mapping[str, Tensor], tokenizer: Any, directory: Path
) -> None:
    """Write an ordinary model directory, in the dtype that the layers ran in.

    Args:
        model: A model of transformers, sharded or not: only its configuration is read.
        weights: Its whole state dict.
        tokenizer: Goes with it.
        directory: Where.
    """
    cast = {name: tensor.to(model.dtype) for name, tensor in weights.items()}
    model.save_pretrained(directory, state_dict=cast)
    tokenizer.save_pretrained(directory)


@torch.no_grad()
def check_export(
    directory: Path, batch: Tensor, logits: Tensor, tolerance: float | None = None
) -> tuple[bool, str]:
    """Load an export with plain transformers, compare its logits, and let it write.

    Args:
        directory: Where it is.
        batch: Token ids, ``[batch, length]``.
        logits: What the trained model makes of them.
        tolerance: For the relative difference; default: what fits the dtype of the export.

    Returns:
        Whether the logits agree and something was generated; and what was.
    """
    model = AutoModelForCausalLM.from_pretrained(directory).to(batch.device)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    error = torch.linalg.vector_norm(model(input_ids=batch).logits.float() - logits.float())
    relative = error / torch.linalg.vector_norm(logits.float())
    # In bf16, autocast rounds between the layers where the plain model does not.
    if tolerance is None:
        tolerance = 1e-4 if model.dtype == torch.float32 else 3e-2
    agrees = bool(relative < tolerance)
    prompt = batch[:1, :8]
    written = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False
    )
    return agrees and written.shape[1] > prompt.shape[1], tokenizer.decode(written[0])
