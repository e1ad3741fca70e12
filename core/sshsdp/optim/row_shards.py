"""Matrices that are spread over ranks by full rows, as an optimizer sees them.

An update tensor of ``granularity="row"`` is a flat piece of one parameter that is cut between rows
only. `RowShard` tells which rows of which matrices it holds, and which ranks hold the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from sshsdp.comm.collectives import Collectives

__all__ = ["LocalRows", "RowShard", "row_shard_of"]

_ATTRIBUTE = "_sshsdp_row_shard"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRows:
    """This rank's rows of one matrix: a slice of the flat piece seen as ``[rows, width]``.

    Attributes:
        name: Name of the optimization unit.
        shape: Shape of the whole matrix, as the optimizer would see it.
        rows: Rows of the piece.
        columns: Columns of the piece.
        is_cut: Whether other ranks hold rows of it too; if not, one rank holds all of it.
    """

    name: str
    shape: tuple[int, ...]
    rows: slice
    columns: slice
    is_cut: bool


@dataclass(frozen=True, eq=False, kw_only=True)
class RowShard:
    """What a flat piece of a parameter holds.

    Attributes:
        width: Elements in a stored row of the parameter.
        matrices: The matrices that the parameter consists of, the same ones on every rank; those of
            which this rank has nothing have no rows.
        axes: Over which the rows of one matrix are spread.
    """

    width: int
    matrices: tuple[LocalRows, ...]
    axes: tuple[Collectives, ...]

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """This rank's rows of every matrix inside ``flat``, which is laid out like the piece."""
        table = flat.view(-1, self.width)
        return [table[matrix.rows, matrix.columns] for matrix in self.matrices]

    def attach_to(self, tensor: torch.Tensor) -> None:
        """Let `row_shard_of` find it."""
        setattr(tensor, _ATTRIBUTE, self)


def row_shard_of(tensor: torch.Tensor) -> RowShard | None:
    """The row shard that an update tensor is, if it is one."""
    found: RowShard | None = getattr(tensor, _ATTRIBUTE, None)
    return found
