"""SS-HSDP: sharded data parallelism with runtime parameters and update parameters laid out apart.

Example:
    >>> import sshsdp, torch  # doctest: +SKIP
    >>> engine = sshsdp.shard(model)  # doctest: +SKIP
    >>> optimizer = engine.attach(torch.optim.AdamW(model.parameters(), lr=3e-4))  # doctest: +SKIP
"""

from sshsdp.checkpoint.place import find_checkpoint
from sshsdp.checkpoint.store import (
    checkpoint_directory,
    read_checkpoint,
    write_checkpoint,
    write_checkpoint_file,
)
from sshsdp.comm.rendezvous import on_rank_0, together
from sshsdp.engine.build import shard
from sshsdp.engine.engine import Engine, UpdateParameter
from sshsdp.formats.dense import DenseFormat
from sshsdp.formats.mxfp8 import MXFP8Format
from sshsdp.layout.optimization_units import OptimizationUnit, Split
from sshsdp.optim.granularity import register_optimizer
from sshsdp.packs import Pack, find_packs
from sshsdp.policies import RuntimePolicy, UpdatePolicy
from sshsdp.pretrained import from_pretrained
from sshsdp.pretrained_saving import save_pretrained
from sshsdp.stats import Stats

__all__ = [
    "DenseFormat",
    "Engine",
    "MXFP8Format",
    "OptimizationUnit",
    "Pack",
    "RuntimePolicy",
    "Split",
    "Stats",
    "UpdateParameter",
    "UpdatePolicy",
    "checkpoint_directory",
    "find_checkpoint",
    "find_packs",
    "from_pretrained",
    "on_rank_0",
    "read_checkpoint",
    "register_optimizer",
    "save_pretrained",
    "shard",
    "together",
    "write_checkpoint",
    "write_checkpoint_file",
]

__version__ = "0.1.0"
