"""A communication unit: the parameters that are gathered and freed together.

::

    SHARDED --gather()--> GATHERING --wait()--> GATHERED --free()--> SHARDED

Asking for a state that a unit is in already does nothing, so callers need not track it.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING

from sshsdp.parameters.reads import Reads

if TYPE_CHECKING:
    from torch import nn

    from sshsdp.comm.collectives import Pending
    from sshsdp.parameters.slots import PackSlot, ParameterSlot
    from sshsdp.spaces.space import ShardedSpace

__all__ = ["Unit", "UnitState"]


class UnitState(Enum):
    """What of a unit's runtime parameters is on this rank."""

    SHARDED = auto()
    GATHERING = auto()
    GATHERED = auto()


class Unit:
    """The spaces of one unit and where it stands in forward and backward.

    Attributes:
        name: FQN of its module, ``"<root>"`` for the model itself.
        module: The module whose forward gathers and frees it.
        spaces: One address space for each runtime format and trainability.
        reads: What the gathered parameters are good for (or will be, while `GATHERING`).
        recomputes: Backward runs this unit's forward again (activation checkpointing), on some
            rank; true until it is known.
        num_pending_backwards: Forward calls whose backward has not come yet.
        num_expected_recomputes: Forward calls without grad inside a forward with grad (reentrant
            activation checkpointing): their recomputation will come in backward.
        kept_for_backward: Some forward call left no tensor to hook, so that nothing would gather
            the unit in backward: it stays gathered until backward is over.
        hooks_outputs: Whether the outputs of the running forward call get backward hooks.
    """

    def __init__(
        self, name: str, module: nn.Module, spaces: list[ShardedSpace], is_root: bool
    ) -> None:
        """Start sharded."""
        self.name = name
        self.module = module
        self.spaces = spaces
        self.is_root = is_root
        self.state = UnitState.SHARDED
        self.reads = Reads.NOTHING
        self.recomputes = True
        self.num_pending_backwards = 0
        self.num_expected_recomputes = 0
        self.kept_for_backward = False
        self.hooks_outputs = False
        self._gathers: list[Pending] = []
        for slot in (*self.slots, *self.packs):
            slot.unit = self

    @property
    def slots(self) -> list[ParameterSlot]:
        """The slots of all spaces."""
        return [slot for space in self.spaces for slot in space.slots]

    @property
    def packs(self) -> list[PackSlot]:
        """The packs of all spaces."""
        return [pack for space in self.spaces for pack in space.packs]

    @property
    def trainable_spaces(self) -> list[ShardedSpace]:
        """The spaces with gradients."""
        return [space for space in self.spaces if space.trainable]

    @property
    def gathered_bytes(self) -> int:
        """Bytes of gathered parameters that are allocated now."""
        if self.state is UnitState.SHARDED:
            return 0
        return sum(space.runtime.gathered_nbytes for space in self.spaces)

    def has(self, reads: Reads) -> bool:
        """Whether the parameters are gathered for this, or on their way."""
        return self.state is not UnitState.SHARDED and reads in self.reads

    def gather(self, reads: Reads) -> None:
        """Start gathering what is not there yet, in one group of collectives.

        Receives (S - 1) / S of the runtime bytes from the peers.
        """
        if self.has(reads):
            return
        if not any(space.runtime.splits_reads for space in self.spaces):
            reads = Reads.BOTH
        self.state = UnitState.GATHERING
        self.reads |= reads
        parts = [part for space in self.spaces for part in space.parts_to_gather(reads)]
        if parts:
            gather = self.spaces[0].topology.gather
            self._gathers.append(gather.all_gather_together(parts, self.name))

    @property
    def is_there(self) -> bool:
        """Whether `wait` is known not to block."""
        return all(pending.is_through for pending in self._gathers)

    def wait(self, reads: Reads) -> None:
        """Have the parameters, gathering them if nobody started to."""
        self.gather(reads)
        if self.state is UnitState.GATHERED:
            return
        for pending in self._gathers:
            pending.wait()
        self._gathers = []
        for slot in (*self.slots, *self.packs):
            slot.show()
        self.state = UnitState.GATHERED

    def show_dense(self) -> None:
        """Let gathered parameters be read and written as dense tensors until they are freed."""
        for space in self.spaces:
            space.runtime.show_dense()
        for slot in (*self.slots, *self.packs):
            slot.show()

    def free(self) -> None:
        """Give the gathered parameters back."""
        if self.state is UnitState.SHARDED:
            return
        self.wait(self.reads)
        for space in self.spaces:
            space.runtime.free()
        for slot in (*self.slots, *self.packs):
            slot.hide()
        self.state = UnitState.SHARDED
        self.reads = Reads.NOTHING

    def free_what_only_forward_reads(self) -> None:
        """Give back what backward would not read; the rest stays gathered."""
        if self.state is not UnitState.SHARDED and Reads.FORWARD in self.reads:
            self.wait(self.reads)
            for space in self.spaces:
                space.runtime.free_what_only_forward_reads()
            if any(space.runtime.splits_reads for space in self.spaces):
                self.reads &= ~Reads.FORWARD

    def forget_calls(self) -> None:
        """Drop what was noted of forward calls."""
        self.num_pending_backwards = 0
        self.num_expected_recomputes = 0
        self.kept_for_backward = False

    @property
    def is_complete(self) -> bool:
        """Whether no more gradients are expected in this backward."""
        return self.num_pending_backwards <= 0 and self.num_expected_recomputes <= 0
