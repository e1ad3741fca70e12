"""Who multiplies block-scaled matrices here.

Example:
    >>> choose_backend("auto", torch.device("cpu"), "rceil").name
    'emulation'
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from sshsdp.formats.mxfp8_emulation import Emulation
from sshsdp.formats.mxfp8_te import TransformerEngine
from sshsdp.formats.mxfp8_torch import TorchScaled

if TYPE_CHECKING:
    from sshsdp.formats.mxfp8 import Backend
    from sshsdp.formats.mxfp8_blocks import ScaleRounding
    from sshsdp.formats.mxfp8_gemm import GemmBackend

__all__ = ["choose_backend"]

logger = logging.getLogger(__name__)


def choose_backend(
    wanted: Backend,
    device: torch.device,
    rounding: ScaleRounding,
    dtype: torch.dtype = torch.float32,
) -> GemmBackend:
    """The backend to use, and a line in the log that says which and why.

    Args:
        wanted: As in ``MXFP8Format(backend=...)``.
        device: Where to multiply.
        rounding: As in ``MXFP8Format(rounding=...)``.
        dtype: Of the products.

    Returns:
        The one wanted, or where it cannot run (a warning says why) the first that can of ``te``,
        ``torch`` and ``emulation``.
    """
    candidates: list[type[GemmBackend]] = [TransformerEngine, TorchScaled, Emulation]
    reasons = {
        kind.name: kind.why_not(device, rounding)
        or (None if dtype in kind.dtypes else f"makes no products in {dtype}")
        for kind in candidates
    }
    chosen = next(kind for kind in candidates if reasons[kind.name] is None)
    refused = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)
    if wanted != "auto" and reasons[wanted] is None:
        chosen = next(kind for kind in candidates if kind.name == wanted)
        refused = ""
    elif wanted != "auto":
        logger.warning(
            "MXFP8Format(backend=%r) cannot run on %s (%s): %s is used instead",
            wanted,
            device,
            reasons[wanted],
            chosen.name,
        )
    logger.info(
        "MXFP8 products on %s: %s%s", device, chosen.name, f" ({refused})" if refused else ""
    )
    return chosen()
