"""Make the name ``"sshsdp"`` known to Lightning, whenever and wherever Lightning is imported.

Lightning looks a strategy string up in one registry for each of its packages and has no entry point
for strategies. So `install` puts the name into the registries that exist and leaves an import hook
for those that do not. It runs on ``import lightning_sshsdp``, and, where the package is only
installed, when torch is imported: `autoload` is an entry point of the ``torch.backends`` group.
That group is meant for device backends; it is used here because nothing else runs before the
Trainer resolves its strategy. ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` turns it off.

Note: importing torch must never fail because of us. Only the standard library is imported here, the
strategy's code is loaded when the string is used, and `autoload` swallows its own errors.
"""

from __future__ import annotations

import importlib.abc
import logging
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

__all__ = ["STRATEGY_NAME", "autoload", "install"]

STRATEGY_NAME = "sshsdp"

logger = logging.getLogger(__name__)

# Package of strategies: (name of its registry, module of the strategy class for it).
_REGISTRIES = {
    "lightning.pytorch.strategies": ("StrategyRegistry", "lightning_pytorch"),
    "pytorch_lightning.strategies": ("StrategyRegistry", "pytorch_lightning"),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", "lightning_fabric"),
    "lightning_fabric.strategies": ("STRATEGY_REGISTRY", "standalone_fabric"),
}


class _LazyStrategy:
    """What the registry calls: imports the strategy's class when it is wanted."""

    def __init__(self, flavour: str) -> None:
        self._flavour = flavour

    def __call__(self, **options: Any) -> Any:
        module = import_module(f"lightning_sshsdp.flavours.{self._flavour}")
        return module.SSHSDPStrategy(**options)


def _register(module: ModuleType) -> None:
    registry_name, flavour = _REGISTRIES[module.__name__]
    registry = getattr(module, registry_name, None)
    if registry is not None and STRATEGY_NAME not in registry:
        registry.register(
            STRATEGY_NAME,
            _LazyStrategy(flavour),
            description="Sharded data parallelism with runtime and update parameters laid out apart",
        )


class _RegisteringLoader(importlib.abc.Loader):
    """Runs a module's own loader, then registers the strategy in it."""

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
        try:
            _register(module)
        except Exception:
            logger.warning(
                "could not register %r in %s", STRATEGY_NAME, module.__name__, exc_info=True
            )


class _RegisteringFinder(importlib.abc.MetaPathFinder):
    """Finds the strategy packages of Lightning as usual, with a `_RegisteringLoader`."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname not in _REGISTRIES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


def install() -> None:
    """Register in every registry that exists, and in the others once they do. Idempotent."""
    for name in _REGISTRIES:
        if name in sys.modules:
            _register(sys.modules[name])
    if not any(isinstance(finder, _RegisteringFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegisteringFinder())


def autoload() -> None:
    """Entry point that ``import torch`` calls. Importing this module has done the work already."""
    try:
        install()
    except Exception:
        logger.debug("sshsdp: strategy not registered", exc_info=True)
