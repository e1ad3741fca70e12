"""Hugging Face Accelerate for `sshsdp`: a drop-in ``Accelerator`` and its plugin.

Example:
    >>> from accelerate_sshsdp import Accelerator  # doctest: +SKIP
    >>> accelerator = Accelerator(mixed_precision="bf16")  # doctest: +SKIP
    >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # doctest: +SKIP
"""

from accelerate_sshsdp.accelerator import Accelerator
from accelerate_sshsdp.plugin import SSHSDPPlugin
from accelerate_sshsdp.sharding import engine_of

__all__ = ["Accelerator", "SSHSDPPlugin", "engine_of"]
