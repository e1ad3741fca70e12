"""Checks of what forward reads, against what the optimizer owns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.support.training import prepare_model, subject_of

if TYPE_CHECKING:
    from torch import nn

    import sshsdp
    from tests.support.training import Recipe

__all__ = ["assert_forward_uses_masters", "assert_runtime_is_cast_of_masters"]


def assert_runtime_is_cast_of_masters(model: nn.Module, engine: sshsdp.Engine) -> None:
    """Every gathered runtime weight is, bit for bit, its update parameter in the runtime dtype."""
    masters = engine.full_state_dict(rank0_only=False)
    with engine.unsharded(), torch.no_grad():
        for name, parameter in model.named_parameters(remove_duplicate=False):
            expected = masters[name].to(parameter.dtype)
            assert torch.equal(parameter, expected), f"{name} is not the cast of its master"


def assert_forward_uses_masters(
    recipe: Recipe, model: nn.Module, engine: sshsdp.Engine, batch: Any
) -> None:
    """The loss is, bit for bit, that of a plain model that holds the cast masters."""
    plain = prepare_model(recipe)
    plain.load_state_dict(engine.full_state_dict(rank0_only=False))
    plain.to(recipe.dtype or torch.get_default_dtype())
    with torch.no_grad():
        actual = subject_of(recipe).loss(model, batch)
        expected = subject_of(recipe).loss(plain, batch)
    assert torch.equal(actual, expected), f"the forward gave {actual}, the masters give {expected}"
