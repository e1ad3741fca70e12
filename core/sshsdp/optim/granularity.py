"""Which optimization unit an optimizer must see whole."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from sshsdp.optim.blocks import block_size_of

if TYPE_CHECKING:
    from sshsdp.layout.cuts import Granularity

__all__ = ["granularity_of", "register_optimizer"]

logger = logging.getLogger(__name__)

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
    torch.optim.Adafactor: "matrix",
    torch.optim.Muon: "matrix",
}

_REFUSED = {
    torch.optim.LBFGS: "it calls the model several times in a step and works on all parameters at "
    "once",
    torch.optim.SparseAdam: "it takes sparse gradients only, and gradients are summed dense",
}

_told: set[type[torch.optim.Optimizer]] = set()


def register_optimizer(cls: type[torch.optim.Optimizer], *, granularity: Granularity) -> None:
    """Say how finely an optimizer's work may be cut.

    Args:
        cls: The optimizer class; subclasses that are not registered themselves share its entry.
        granularity: ``"element"``: each element is updated from its own gradient and state alone.
            ``"matrix"``: each parameter is updated on its own, and must be seen whole.

    Raises:
        ValueError: An unknown granularity.
        TypeError: ``cls`` is not an optimizer class.
    """
    if granularity not in ("element", "matrix"):
        raise ValueError(f"granularity must be 'element' or 'matrix', got {granularity!r}")
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise TypeError(f"register_optimizer takes a torch.optim.Optimizer subclass, got {cls!r}")
    _REGISTRY[cls] = granularity


def granularity_of(optimizer: torch.optim.Optimizer) -> Granularity:
    """The granularity of an optimizer, by its class or the nearest registered base.

    torchao's low-bit optimizers have ``"block"`` without being registered. Of an unknown class
    nothing is assumed but that it updates each parameter on its own, which is said once in the log.

    Raises:
        ValueError: The class cannot work on a sharded model.
    """
    if block_size_of(optimizer) is not None:
        return "block"
    for cls in type(optimizer).__mro__:
        if cls in _REGISTRY:
            return _REGISTRY[cls]
        if cls in _REFUSED:
            raise ValueError(
                f"{type(optimizer).__name__} cannot train a sharded model: {_REFUSED[cls]}"
            )
    if type(optimizer) not in _told:
        _told.add(type(optimizer))
        logger.info(
            "%s is not known: every parameter is given to it whole, on one rank. If it updates "
            "each element on its own, sshsdp.register_optimizer(%s, granularity='element') lets "
            "it work on flat shards, which is faster. If it computes anything over several "
            "parameters together, it will not do what it does on one process",
            type(optimizer).__name__,
            type(optimizer).__name__,
        )
    return "matrix"
