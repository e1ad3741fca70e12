"""Flat buffers whose memory comes and goes while views of them stay valid.

Note: freeing by storage resize. A gathered buffer is freed with ``untyped_storage().resize_(0)``
and allocated by resizing back. Tensors over the storage, among them the ones that autograd saved
for backward, stay valid objects and see the new contents after the next gather. Every tensor over a
buffer is made with ``set_`` on the storage itself, so each has a version counter of its own: a
gather that writes through the flat alias does not look like an in-place change of a parameter to
autograd.
"""

import torch

__all__ = ["FlatBuffer"]


class FlatBuffer:
    """A 1-D buffer of ``numel`` elements that can be freed and allocated again.

    Example:
        >>> buffer = FlatBuffer(6, torch.float32, torch.device("cpu"))
        >>> weight = buffer.view(0, (2, 3), (3, 1))
        >>> buffer.free()
        >>> buffer.allocate()
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        """Create the buffer, allocated."""
        self.flat = torch.empty(numel, dtype=dtype, device=device)
        self._storage = self.flat.untyped_storage()
        self.nbytes = self._storage.nbytes()
        self._keep = False

    @classmethod
    def over(cls, tensor: torch.Tensor) -> "FlatBuffer":
        """A buffer over the whole storage of a 1-D ``tensor`` that is never freed."""
        buffer = cls(0, tensor.dtype, tensor.device)
        buffer._storage = tensor.untyped_storage()
        buffer.nbytes = buffer._storage.nbytes()
        buffer._keep = True
        buffer.flat = buffer.view(0, (tensor.numel(),), (1,))
        return buffer

    def view(self, start: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
        """A tensor over ``[start, ...)`` of the buffer, which must be allocated."""
        with torch.no_grad():
            empty = torch.empty(0, dtype=self.flat.dtype, device=self.flat.device)
            return empty.set_(self._storage, start, shape, stride)

    @property
    def is_allocated(self) -> bool:
        """Whether the memory is there."""
        return self._storage.nbytes() == self.nbytes

    def allocate(self) -> None:
        """Bring the memory back; its contents are undefined."""
        if not self.is_allocated:
            self._storage.resize_(self.nbytes)

    def free(self) -> None:
        """Give the memory back; tensors over it must not be read until the next `allocate`."""
        if not self._keep and self.nbytes:
            self._storage.resize_(0)
