"""The names of a model's modules, as they are in its state dict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_WRAPPED_MODULE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

__all__ = ["named_modules"]


def named_modules(
    model: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """``model.named_modules``, without the level that torch's ``checkpoint_wrapper`` puts in.

    The wrapper takes it out of state dicts too. It comes before the module that it wraps, under the
    same name.
    """
    for name, module in model.named_modules(remove_duplicate=remove_duplicate):
        levels = [level for level in name.split(".") if level != _CHECKPOINT_WRAPPED_MODULE]
        yield ".".join(levels), module
