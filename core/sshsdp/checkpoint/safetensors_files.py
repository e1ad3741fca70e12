"""The safetensors files of a model: what is in which, and slices of it into chunks of tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from sshsdp.checkpoint.chunks import ChunkedTensor

if TYPE_CHECKING:
    import torch

__all__ = ["INDEX_NAME", "SINGLE_NAME", "SafetensorsFiles"]

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


class SafetensorsFiles:
    """One file, or several with an index.

    Attributes:
        directory: Where they are.
        shapes: Of all tensors, by key.
    """

    def __init__(self, directory: Path, names: list[str]) -> None:
        """Read the headers of the files ``names``; map nothing for good."""
        self.directory = directory
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._file_of: dict[str, Path] = {}
        for name in names:
            path = directory / name
            if not path.is_file():
                raise FileNotFoundError(f"{directory / INDEX_NAME} names {path}, which is missing")
            with safe_open(path, framework="pt") as file:
                for key in file.keys():
                    self.shapes[key] = tuple(file.get_slice(key).get_shape())
                    self._file_of[key] = path

    @classmethod
    def find(cls, directory: str | Path) -> SafetensorsFiles:
        """The files of a directory that ``save_pretrained`` wrote.

        Raises:
            FileNotFoundError: There are none.
        """
        directory = Path(directory)
        index = directory / INDEX_NAME
        if (directory / SINGLE_NAME).is_file():
            return cls(directory, [SINGLE_NAME])
        if index.is_file():
            files = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            return cls(directory, list(dict.fromkeys(files)))
        raise FileNotFoundError(
            f"{directory} holds neither {SINGLE_NAME} nor {INDEX_NAME}: give a local directory "
            "that save_pretrained() or huggingface_hub.snapshot_download() wrote"
        )

    def place(self, key: str) -> Path:
        """The file that has a tensor."""
        return self._file_of[key]

    def read(self, key: str, target: torch.Tensor) -> None:
        """Copy a tensor, or of a `ChunkedTensor` its chunks, converted to the target's dtype."""
        with safe_open(self._file_of[key], framework="pt") as file:
            if not isinstance(target, ChunkedTensor) or not target.ndim:
                tensor = file.get_tensor(key)
                chunks = target.chunks() if isinstance(target, ChunkedTensor) else [((), target)]
                for _, chunk in chunks:
                    chunk.copy_(tensor)
                return
            source: Any = file.get_slice(key)
            for offsets, chunk in target.chunks():
                parts = zip(offsets, chunk.shape, strict=True)
                chunk.copy_(source[tuple(slice(o, o + size) for o, size in parts)])
