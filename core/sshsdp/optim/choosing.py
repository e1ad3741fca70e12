"""Which parameters Muon takes and which AdamW."""

from __future__ import annotations

import logging
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn

from sshsdp.assembly.discovery import find_unit_modules
from sshsdp.assembly.patterns import check_patterns
from sshsdp.optim.muon import Muon

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["muon_with_adamw"]

logger = logging.getLogger(__name__)


def muon_with_adamw(
    model: nn.Module,
    *,
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    adamw_lr: float | None = None,
    betas: tuple[float, float] = (0.9, 0.95),
    adamw_eps: float = 1e-8,
    adjust_lr_fn: str | None = "match_rms_adamw",
    to_muon: Sequence[str] = (),
    to_adamw: Sequence[str] = (),
    **options: Any,
) -> Muon:
    """One optimizer: Muon for hidden matrices, AdamW for embeddings, head, norms and biases.

    Hidden are the parameters of two or more dims inside the repeated blocks (children of
    ``nn.ModuleList``), or, in a model without such blocks, all but the last linear layer's;
    embeddings never are. AdamW decays what has two or more dims. The choice is logged.

    Args:
        model: Before or after `sshsdp.shard`. Frozen parameters are left out.
        lr: Muon's learning rate.
        weight_decay: Of both.
        adamw_lr: AdamW's; default: ``lr``, which suits ``adjust_lr_fn="match_rms_adamw"``.
        betas: AdamW's.
        adamw_eps: AdamW's.
        adjust_lr_fn: See `Muon`; the default lets both algorithms share a learning rate.
        to_muon: Name patterns of parameters that Muon takes whatever the rule says.
        to_adamw: Name patterns of parameters that AdamW takes whatever the rule says.
        **options: Other options of `Muon`.

    Returns:
        A `Muon` with up to three param groups: Muon's, AdamW's with weight decay and AdamW's
        without.

    Raises:
        ValueError: A pattern matches no parameter, or both kinds match one; `Muon` gets a
            parameter that is no matrix.
    """
    names = {name: parameter for name, parameter in model.named_parameters()}
    check_patterns([*to_muon, *to_adamw], names, "muon_with_adamw")
    hidden = _hidden(model)
    groups: dict[str, list[nn.Parameter]] = {"Muon": [], "AdamW": [], "AdamW, no weight decay": []}
    lines = []
    for name, parameter in names.items():
        if not parameter.requires_grad:
            continue
        wants = _matches(name, to_muon), _matches(name, to_adamw)
        if all(wants):
            raise ValueError(f"muon_with_adamw: both to_muon and to_adamw match {name!r}")
        is_muon = wants[0] or (name in hidden and not wants[1])
        kind = "Muon" if is_muon else "AdamW" if parameter.ndim > 1 else "AdamW, no weight decay"
        groups[kind].append(parameter)
        lines.append(f"  {name} {tuple(parameter.shape)}: {kind}")
    logger.info("muon_with_adamw:\n%s", "\n".join(lines))
    adamw = {
        "algorithm": "adamw",
        "lr": lr if adamw_lr is None else adamw_lr,
        "betas": betas,
        "adamw_eps": adamw_eps,
    }
    settings: dict[str, dict[str, Any]] = {
        "Muon": {},
        "AdamW": adamw,
        "AdamW, no weight decay": {**adamw, "weight_decay": 0.0},
    }
    return Muon(
        [{"params": found, **settings[kind]} for kind, found in groups.items() if found],
        lr=lr,
        weight_decay=weight_decay,
        adjust_lr_fn=adjust_lr_fn,
        **options,
    )


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _hidden(model: nn.Module) -> set[str]:
    """Names of matrices that are neither embeddings nor at the model's ends."""
    blocks = find_unit_modules(model, None)
    tables = {
        parameter
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for parameter in module.parameters(recurse=False)
    }
    heads = [module for module in model.modules() if isinstance(module, nn.Linear)][-1:]
    last = {parameter for head in heads for parameter in head.parameters()}
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1
        and parameter not in tables
        and (
            any(name.startswith(f"{block}.") for block in blocks)
            if blocks
            else parameter not in last
        )
    }
