"""Functions of Lightning's that cannot work with sharded modules, replaced by ones that do.

* ``LightningModule.load_from_checkpoint`` opens the path as a file, which is an
  ``IsADirectoryError`` for a sharded checkpoint. The function that reads the file is replaced by
  one that reads such directories itself: only the model, not the optimizers.
* ``lightning.pytorch.utilities.grad_norm`` looks at the ``.grad`` of parameters, which have none
  here. It is replaced by one that asks the engine.

* ``precision="mxfp8"`` is refused by the Trainer and by Fabric before they ask their strategy.
  The functions that check it are replaced by ones that let it through to ours.

For everything else they call Lightning's own.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

__all__ = ["know_mxfp8", "look_into_shards", "read_directories"]

_MARK = "_sshsdp_replaces"

# Nothing of ours is imported before it is needed: this module is loaded along with torch.


def read_directories(saving: ModuleType) -> None:
    """Make a ``core.saving`` module of Lightning read checkpoint directories too. Idempotent."""
    original = saving.pl_load
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def load(path_or_url: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(path_or_url, (str, Path)) and not Path(path_or_url).is_file():
            from lightning_sshsdp.sharded_files import read_metadata, read_whole_model
            from sshsdp import find_checkpoint

            path = find_checkpoint(path_or_url)
            if path.is_dir():
                metadata = read_metadata(path, kwargs.get("weights_only"))
                return {**metadata, "state_dict": read_whole_model(path)}
        return original(path_or_url, *args, **kwargs)

    saving.pl_load = _marked(load)


def look_into_shards(grads: ModuleType) -> None:
    """Make a ``utilities.grads`` module of Lightning know sharded modules. Idempotent."""
    original = grads.grad_norm
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def grad_norm(module: Any, *args: Any, **kwargs: Any) -> Any:
        from lightning_sshsdp.environment import engine_of

        if engine_of(module) is None:
            return original(module, *args, **kwargs)
        from lightning_sshsdp.gradient_norms import grad_norm as norms_of_shards

        return norms_of_shards(module, *args, **kwargs)

    grads.grad_norm = _marked(grad_norm)
    # Whoever has imported the function by name already keeps the old one; the package need not.
    package = vars(sys.modules.get(grads.__name__.rpartition(".")[0], grads))
    if package.get("grad_norm") is original:
        package["grad_norm"] = grads.grad_norm


def know_mxfp8(connector: ModuleType) -> None:
    """Make a connector module of Lightning take ``precision="mxfp8"``. Idempotent."""
    convert = connector._convert_precision_to_unified_args
    kind = getattr(connector, "_AcceleratorConnector", None) or connector._Connector
    if hasattr(kind._check_and_init_precision, _MARK):
        return

    @functools.wraps(convert)
    def convert_all(precision: Any) -> Any:
        return precision if precision == "mxfp8" else convert(precision)

    original = kind._check_and_init_precision

    @functools.wraps(original)
    def check(self: Any) -> Any:
        flag = "_precision_flag" if hasattr(self, "_precision_flag") else "_precision_input"
        if getattr(self, flag) != "mxfp8":
            return original(self)
        from lightning_sshsdp.environment import StrategyMixin
        from lightning_sshsdp.precision import mxfp8_plugin

        if not isinstance(self.strategy, StrategyMixin):
            raise ValueError(
                f"precision='mxfp8' is the sshsdp strategy's, not {type(self.strategy).__name__}'s:"
                " add strategy='sshsdp'"
            )
        # Activations, norms and what is not quantized are in bfloat16 and float32.
        setattr(self, flag, "bf16-mixed")
        return mxfp8_plugin(original(self))

    connector._convert_precision_to_unified_args = convert_all
    kind._check_and_init_precision = _marked(check)


def _marked(function: Callable[..., Any]) -> Callable[..., Any]:
    setattr(function, _MARK, True)
    return function
