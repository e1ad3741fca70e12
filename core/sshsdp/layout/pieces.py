"""A piece: the part of one parameter that falls into one range of an address space."""

from dataclasses import dataclass

__all__ = ["Piece"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Part of a parameter inside a flat range of an address space.

    The parameter's elements are counted in *storage order*: row-major over ``shape``, or, for a
    transposed parameter, row-major over ``shape`` with its last two dims swapped.

    Attributes:
        name: Fully qualified name of the parameter.
        shape: Its logical (original) shape.
        start: First element of the piece, in the parameter's storage order.
        stop: One past the last element of the piece.
        offset: Where the piece begins inside the flat range it was cut from, in elements.
        transposed: Whether the parameter is stored transposed.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int
    transposed: bool = False

    @property
    def numel(self) -> int:
        """Number of elements of the piece."""
        return self.stop - self.start
