"""Lightning's precision plugins, made to work on sharded gradients."""

from __future__ import annotations

from typing import Any

import torch

from lightning_sshsdp.grad_scaler import GlobalGradScaler
from lightning_sshsdp.options import SUPPORTED_PRECISIONS

__all__ = ["asks_for_mxfp8", "check_precision", "mxfp8_plugin", "share_scaler"]

_MXFP8 = "_sshsdp_quantizes"

# Plugins that belong to other strategies, or change modules in ways that the engine does not know.
_REFUSED = (
    "FSDPPrecision",
    "DeepSpeedPrecision",
    "XLAPrecision",
    "BitsandbytesPrecision",
    "TransformerEnginePrecision",
)


def check_precision(plugin: Any) -> None:
    """Raise if a plugin's precision is not supported.

    Raises:
        ValueError: With the list of those that are.
    """
    name = getattr(plugin, "precision", None)
    # By name: the same plugin is another class in each of Lightning's packages.
    is_refused = any(cls.__name__ in _REFUSED for cls in type(plugin).__mro__)
    if name not in SUPPORTED_PRECISIONS or is_refused:
        raise ValueError(
            f"the sshsdp strategy does not support {type(plugin).__name__} with precision {name!r}:"
            f" choose one of {', '.join(SUPPORTED_PRECISIONS)}"
        )


def mxfp8_plugin(plugin: Any) -> Any:
    """Have a plugin say that linear layers are to be in MXFP8; what it does itself stays."""
    setattr(plugin, _MXFP8, True)
    return plugin


def asks_for_mxfp8(plugin: Any) -> bool:
    """Whether `mxfp8_plugin` made the plugin."""
    return getattr(plugin, _MXFP8, False)


def share_scaler(plugin: Any) -> None:
    """Give a plugin with a gradient scaler one whose ranks agree."""
    scaler = getattr(plugin, "scaler", None)
    if isinstance(scaler, torch.amp.GradScaler) and not isinstance(scaler, GlobalGradScaler):
        plugin.scaler = GlobalGradScaler.like(scaler)
