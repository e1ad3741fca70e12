"""Models for `sshsdp plan`, built on the meta device: no weights, no memory."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["load_model"]


def load_model(source: str) -> nn.Module:
    """Build a model on meta.

    Args:
        source: A Hugging Face config, as a JSON file or a directory with a ``config.json``; or
            ``module:function``, a function without arguments that returns the model.

    Raises:
        ValueError: The source is neither, or does not lead to a model.
        RuntimeError: A config was given and transformers is not installed.
    """
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return _from_config(path)
    if ":" in source:
        return _from_function(source)
    raise ValueError(
        f"--model {source!r}: neither a config file, nor a directory with a config.json, nor "
        "module:function"
    )


def _from_function(source: str) -> nn.Module:
    module_name, _, function_name = source.partition(":")
    # A console script does not look for modules where it was started, as `python -m` does.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"--model {source!r}: cannot import {module_name!r}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"--model {source!r}: {module_name!r} has no function {function_name!r}")
    with torch.device("meta"):
        model = function()
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"--model {source!r}: it returned {type(model).__name__}, not a torch.nn.Module"
        )
    return model


def _from_config(path: Path) -> nn.Module:
    transformers = _import_transformers(path)
    try:
        values = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"--model {path}: not JSON ({error})") from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise ValueError(f"--model {path}: a Hugging Face config has a model_type")
    model_type = values.pop("model_type")
    try:
        config = transformers.AutoConfig.for_model(model_type, **values)
    except ValueError as error:
        raise ValueError(
            f"--model {path}: transformers {transformers.__version__} does not know "
            f"model_type {model_type!r}"
        ) from error
    with torch.device("meta"):
        model = _model_class(transformers, config)(config)
    assert isinstance(model, nn.Module)
    return model


def _import_transformers(path: Path) -> ModuleType:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise RuntimeError(
            f"--model {path}: building a model from a Hugging Face config needs transformers: "
            "pip install transformers (or give --model module:function)"
        ) from error


def _model_class(transformers: ModuleType, config: Any) -> Any:
    """The class that the config names, else the one for its kind of model."""
    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        if type(config) in auto._model_mapping:
            return auto.from_config
    raise ValueError(f"--model: transformers has no model for {type(config).__name__}")
