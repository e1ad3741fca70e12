"""Make the name ``"sshsdp"`` known to Lightning, whenever and wherever Lightning is imported.

`install` also replaces functions of Lightning's that cannot work with sharded modules (see
`lightning_sshsdp.replaced_functions`).

Lightning looks a strategy string up in one registry for each of its packages and has no entry point
for strategies. So `install` puts the name into the registries that exist and leaves an import hook
for those that do not. It runs on ``import lightning_sshsdp``, and, where the package is only
installed, when torch is imported: `autoload` is an entry point of the ``torch.backends`` group.
That group is meant for device backends; it is used here because nothing else runs before the
Trainer resolves its strategy. ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` turns it off.

Note: importing torch must never fail because of us. Only the standard library is imported here, the
strategy's code is loaded when the string is used, and a failure is logged, not raised.
"""

from __future__ import annotations

import importlib.abc
import logging
import sys
from functools import partial
from importlib import import_module
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

__all__ = ["STRATEGY_NAME", "autoload", "install"]

STRATEGY_NAME = "sshsdp"

logger = logging.getLogger(__name__)


class _LazyStrategy:
    """What the registry calls: imports the strategy's class when it is wanted."""

    def __init__(self, flavour: str) -> None:
        self._flavour = flavour

    def __call__(self, **options: Any) -> Any:
        module = import_module(f"lightning_sshsdp.flavours.{self._flavour}")
        return module.SSHSDPStrategy(**options)


def _register_in(registry_name: str, flavour: str, module: ModuleType) -> None:
    registry = getattr(module, registry_name, None)
    if registry is not None and STRATEGY_NAME not in registry:
        registry.register(
            STRATEGY_NAME,
            _LazyStrategy(flavour),
            description="Sharded data parallelism, runtime and update parameters laid out apart",
        )


def _replace(function: str, replacer: str, module: ModuleType) -> None:
    if hasattr(module, function):
        getattr(import_module("lightning_sshsdp.replaced_functions"), replacer)(module)


# What to do with a module of Lightning's once it is imported.
_ACTIONS: dict[str, Callable[[ModuleType], None]] = {
    f"{package}.strategies": partial(_register_in, registry, flavour)
    for package, registry, flavour in (
        ("lightning.pytorch", "StrategyRegistry", "lightning_pytorch"),
        ("pytorch_lightning", "StrategyRegistry", "pytorch_lightning"),
        ("lightning.fabric", "STRATEGY_REGISTRY", "lightning_fabric"),
        ("lightning_fabric", "STRATEGY_REGISTRY", "standalone_fabric"),
    )
}
for _package in ("lightning.pytorch", "pytorch_lightning"):
    _ACTIONS[f"{_package}.core.saving"] = partial(_replace, "pl_load", "read_directories")
    _ACTIONS[f"{_package}.utilities.grads"] = partial(_replace, "grad_norm", "look_into_shards")
    _ACTIONS[f"{_package}.trainer.connectors.accelerator_connector"] = partial(
        _replace, "_AcceleratorConnector", "know_mxfp8"
    )
for _package in ("lightning.fabric", "lightning_fabric"):
    _ACTIONS[f"{_package}.connector"] = partial(_replace, "_Connector", "know_mxfp8")


def _act_on(module: ModuleType) -> None:
    try:
        _ACTIONS[module.__name__](module)
    except Exception:
        logger.warning("sshsdp could not enter %s", module.__name__, exc_info=True)


class _ActingLoader(importlib.abc.Loader):
    """Runs a module's own loader, then our action on it."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        # Tools that look at a module's loader see the real one.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        _act_on(module)


class _ActingFinder(importlib.abc.MetaPathFinder):
    """Finds those modules as usual, with an `_ActingLoader`."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname not in _ACTIONS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _ActingLoader(spec.loader)
        return spec


def install() -> None:
    """Act on the modules that are imported, and on the others once they are. Idempotent."""
    for name in _ACTIONS:
        if name in sys.modules:
            _act_on(sys.modules[name])
    if not any(isinstance(finder, _ActingFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ActingFinder())


def autoload() -> None:
    """Entry point that ``import torch`` calls. Importing this package has done the work already."""
