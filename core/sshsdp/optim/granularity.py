"""Which optimization unit an optimizer must see whole."""

from __future__ import annotations

from typing import Literal

import torch

from sshsdp.optim.blocks import block_size_of

__all__ = ["Granularity", "granularity_of", "register_optimizer"]

Granularity = Literal["element", "block", "row", "matrix"]

_REGISTRY: dict[type[torch.optim.Optimizer], Granularity] = {
    torch.optim.SGD: "element",
    torch.optim.Adam: "element",
    torch.optim.AdamW: "element",
    torch.optim.Adamax: "element",
    torch.optim.NAdam: "element",
    torch.optim.RAdam: "element",
    torch.optim.Adagrad: "element",
    torch.optim.Adadelta: "element",
    torch.optim.RMSprop: "element",
    torch.optim.Rprop: "element",
    torch.optim.ASGD: "element",
}


def register_optimizer(cls: type[torch.optim.Optimizer], *, granularity: Granularity) -> None:
    """Say how finely an optimizer's work may be cut.

    Args:
        cls: The optimizer class; subclasses that are not registered themselves share its entry.
        granularity: ``"element"``: each element is updated from its own gradient and state alone.

    Raises:
        ValueError: An unknown granularity.
        TypeError: ``cls`` is not an optimizer class.
    """
    if granularity != "element":
        raise ValueError(f"granularity must be 'element', got {granularity!r}")
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise TypeError(f"register_optimizer takes a torch.optim.Optimizer subclass, got {cls!r}")
    _REGISTRY[cls] = granularity


def granularity_of(optimizer: torch.optim.Optimizer) -> Granularity:
    """The granularity of an optimizer, by its class or the nearest registered base.

    torchao's low-bit optimizers have ``"block"`` without being registered.

    Raises:
        ValueError: The class is not known to work on flat pieces of parameters.
    """
    if block_size_of(optimizer) is not None:
        return "block"
    for cls in type(optimizer).__mro__:
        if cls in _REGISTRY:
            return _REGISTRY[cls]
    known = ", ".join(cls.__name__ for cls in _REGISTRY)
    raise ValueError(
        f"{type(optimizer).__name__} is not known to update every element on its own, and would "
        "see flat pieces "
        "of parameters. If it does, say so with "
        f"sshsdp.register_optimizer({type(optimizer).__name__}, "
        f"granularity='element'). Known: {known}"
    )
