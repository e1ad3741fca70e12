"""`ChunkedTensor`: a tensor of which this rank holds some flat ranges, for distributed checkpoints.

It implements the checkpointable protocol of torch.distributed.checkpoint, so that ``dcp.save``
writes the local chunks and ``dcp.load`` reads straight into them, whatever the other side's layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from sshsdp.layout.boxes import Box, boxes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sshsdp.layout.pieces import Piece

__all__ = ["ChunkedTensor"]


class ChunkedTensor(torch.Tensor):
    """A global tensor, and views of the parts of it that are on this rank (maybe none)."""

    _chunks: dict[tuple[int, ...], torch.Tensor]

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        pieces: Iterable[tuple[Piece, torch.Tensor]],
    ) -> ChunkedTensor:
        """Describe a tensor by pieces of it, each with its 1-D contiguous local data."""
        make: Any = torch.Tensor._make_wrapper_subclass
        self: ChunkedTensor = make(cls, shape, dtype=dtype)
        self._chunks = {}
        for piece, data in pieces:
            storage_shape = Box(shape, shape).transposed().sizes if piece.transposed else shape
            start = 0
            for box in boxes(storage_shape, piece.start, piece.stop):
                chunk = data[start : start + box.numel].view(box.sizes)
                start += box.numel
                if piece.transposed:
                    self._chunks[box.transposed().offsets] = chunk.mT
                else:
                    self._chunks[box.offsets] = chunk
        return self

    def __init__(self, *args: Any) -> None:
        """Everything happens in ``__new__``."""

    def chunks(self) -> Sequence[tuple[tuple[int, ...], torch.Tensor]]:
        """``(offsets, view of the local data)`` of every chunk."""
        return list(self._chunks.items())

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """One item for each chunk."""
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk_metadata(offsets, chunk),
                    properties=TensorProperties.create_from_tensor(chunk),
                    size=self.shape,
                ),
            )
            for offsets, chunk in self._chunks.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Where the chunks lie in the global tensor."""
        return [_chunk_metadata(offsets, chunk) for offsets, chunk in self._chunks.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The local data of one chunk."""
        assert index.offset is not None
        return self._chunks[tuple(index.offset)]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch requires the arguments that it gives
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuse arithmetic: this rank does not hold the whole tensor."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise RuntimeError(
            f"{func}: a ChunkedTensor only describes parts of a tensor for a checkpoint; use "
            "engine.full_state_dict() for whole tensors"
        )

    def __repr__(self) -> str:  # type: ignore[override]  # torch names an argument oddly
        """Shape, dtype and what is here."""
        held = sum(chunk.numel() for chunk in self._chunks.values())
        return f"ChunkedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, held={held})"


def _chunk_metadata(offsets: tuple[int, ...], chunk: torch.Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=chunk.shape)
