"""A communication unit: the parameters that are gathered and freed together.

::

    SHARDED --gather()--> GATHERING --wait()--> GATHERED --free()--> SHARDED

Asking for a state that a unit is in already does nothing, so callers need not track it.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from sshsdp.engine.collectives import Pending
    from sshsdp.engine.slots import PackSlot, ParameterSlot
    from sshsdp.engine.space import ShardedSpace

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
        spaces: One address space for each runtime dtype and trainability.
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
        return 0 if self.state is UnitState.SHARDED else sum(s.gathered.nbytes for s in self.spaces)

    def gather(self) -> None:
        """Start gathering."""
        if self.state is not UnitState.SHARDED:
            return
        self.state = UnitState.GATHERING
        self._gathers = [space.gather() for space in self.spaces]

    def wait(self) -> None:
        """Have the parameters, gathering them if nobody started to."""
        self.gather()
        if self.state is UnitState.GATHERED:
            return
        for pending in self._gathers:
            pending.wait()
        self._gathers = []
        for slot in (*self.slots, *self.packs):
            slot.show()
        self.state = UnitState.GATHERED

    def free(self) -> None:
        """Give the gathered parameters back."""
        if self.state is UnitState.SHARDED:
            return
        self.wait()
        for space in self.spaces:
            space.gathered.free()
        for slot in (*self.slots, *self.packs):
            slot.hide()
        self.state = UnitState.SHARDED

    def forget_calls(self) -> None:
        """Drop what was noted of forward calls."""
        self.num_pending_backwards = 0
        self.num_expected_recomputes = 0
        self.kept_for_backward = False

    @property
    def is_complete(self) -> bool:
        """Whether no more gradients are expected in this backward."""
        return self.num_pending_backwards <= 0 and self.num_expected_recomputes <= 0
