"""Which unit is gathered, freed and reduced when.

Note: one order on every rank. Gathers and reductions are issued in an order that does not depend on
what a rank computes. A rank that skips a unit still gathers (and at once frees) it where its turn
is, and reduces zeros for it, so ranks that use different parameters stay in step. The order starts
as the order of registration; after the first backward, the orders in which the ranks really used
the units are merged into one (`orders`). It never decides *whether* a unit with trainable
parameters takes part.

No rank waits for what its peers cannot send yet. Before it waits for a gather, a rank reduces all
that is due. While its backward runs, it waits only for sums over ``shard``, in order, up to the
first unit that it skipped: skippers run ahead of their peers, which may need a later gather before
they join in. When its backward is over, it starts all gathers and reductions that are left before
it waits for any: its peers may need either kind first. What is there meanwhile is taken, and freed.

Forward walks through the units once per call of the root module, backward once per such call whose
graph is reached. Units called out of turn (a second time, or outside of the root module) are
gathered on demand, which all ranks must then do alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.autograd import Variable

from sshsdp.parameters.reads import Reads
from sshsdp.schedule.orders import Orders
from sshsdp.spaces.unit import UnitState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sshsdp.spaces.unit import Unit
    from sshsdp.stats import Stats

    LetGo = Callable[[Unit], None]

__all__ = ["Schedule"]


class _Walk:
    """One pass over the units in a fixed order.

    Attributes:
        reads: What a unit is gathered for.
        frees_gathered: Passing over an unused unit frees it even if it was gathered before the walk
            came to it. True in backward, where the ranks that use the unit free it after its turn.
        ahead: Units whose turn has begun and that were not used yet.
    """

    def __init__(
        self, order: list[Unit], reads: Callable[[Unit], Reads], *, frees_gathered: bool
    ) -> None:
        self.order = order
        self.reads = reads
        self.frees_gathered = frees_gathered
        self.position = {unit: index for index, unit in enumerate(order)}
        self.next = len(order)
        self.ahead: list[Unit] = []

    def start(self, num_ahead: int) -> None:
        """Start gathering the next units before they are needed."""
        for unit in self.order[self.next : self.next + num_ahead]:
            reads = self.reads(unit)
            if not unit.has(reads) or self.frees_gathered:
                unit.gather(reads)
                self.ahead.append(unit)
            self.next += 1

    def advance_to(self, unit: Unit, prefetch: int, let_go: LetGo) -> None:
        """Have ``unit``, after every unit whose turn is before it, and look ahead."""
        position = self.position.get(unit, -1)
        if position >= self.next:
            self.start(position + 1 - self.next)
        if unit in self.ahead:
            self.ahead.remove(unit)
        self.drop_ahead(position, let_go)
        unit.wait(self.reads(unit))
        if 0 <= position < self.next:
            self.start(max(position + 1 + prefetch - self.next, 0))

    def drop_ahead(self, position: int, let_go: LetGo) -> None:
        """Let go of units that were gathered in front of ``position`` and not used."""
        for unit in [unit for unit in self.ahead if self.position[unit] < position]:
            self.ahead.remove(unit)
            let_go(unit)

    def drop_what_is_there(self, let_go: LetGo) -> None:
        """Let go of units that were gathered ahead and that need not be waited for."""
        for unit in [unit for unit in self.ahead if unit.is_there]:
            self.ahead.remove(unit)
            let_go(unit)

    def finish(self, let_go: LetGo, *, waits: bool) -> None:
        """Gather and let go of all that is left.

        Args:
            let_go: Called with every unit.
            waits: One after another; False: wait for nothing before all is on its way.
        """
        while self.next < len(self.order):
            self.drop_what_is_there(let_go)
            self.start(1)
            if waits:
                self.drop_ahead(self.next, let_go)
        self.drop_ahead(self.next, let_go)


def _queue_callback(callback: Callable[[], None]) -> None:
    """Call back at the end of the running backward (the inner one, in a reentrant checkpoint)."""
    Variable._execution_engine.queue_callback(callback)


def _backward_reads(unit: Unit) -> Reads:
    # A unit that only some ranks recompute is gathered for both on all of them.
    return Reads.BOTH if unit.recomputes else Reads.BACKWARD


class Schedule:
    """Drives the units through forward and backward; the hooks in `hooks` call it.

    Attributes:
        is_synchronizing: Whether backward ends in reductions (False under ``no_sync``).
        is_pinned: All units stay gathered (``unsharded()``).
        pass_id: Number of the current (or last) call of the root module.
        on_reduced: Called when all gradients of a backward are reduced.
    """

    on_reduced: Callable[[], None]

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        prefetch: int,
        reshard_after_forward: bool,
        stats: Stats,
        agree_on_orders: Callable[[Orders], Orders],
    ) -> None:
        """Start with the order of registration.

        Args:
            units: All units, root first.
            prefetch: Units gathered ahead.
            reshard_after_forward: Free units after their forward.
            stats: Where peaks are noted.
            agree_on_orders: Collective; gets the orders seen on this rank.
        """
        self.units = list(units)
        self.is_synchronizing = True
        self.is_pinned = False
        self.pass_id = 0
        self._prefetch = prefetch
        self._reshard_after_forward = reshard_after_forward
        self._stats = stats
        self._agree_on_orders = agree_on_orders
        self._use(Orders.of_registration(self.units))
        self._seen: Orders | None = Orders([], [], [], [], [])
        self._agreed: Orders | None = None
        self._pass_depth = 0
        self._pass_has_grad = False
        self._in_backward = False
        self._swept_pass: int | None = None
        self._num_reduced = 0
        self._in_flight: list[Unit] = []
        self._entered: set[Unit] = set()
        self._num_open_passes = 0
        self._gradients_unwanted = False

    def _use(self, orders: Orders) -> None:
        for unit in self.units:
            unit.recomputes = unit in orders.recomputed
        self._forward = _Walk(orders.forward, self._forward_reads, frees_gathered=False)
        # The root stays gathered from forward on, and its backward begins before all others.
        backward = [unit for unit in orders.backward if not unit.is_root]
        self._backward = _Walk(backward, _backward_reads, frees_gathered=True)
        self._reduction = [unit for unit in orders.reduction if unit.trainable_spaces]
        # The last unit of forward is the first of backward: freeing it would gather it twice in a
        # row.
        first = next(iter(self._backward.order), None)
        self._turning_point = first if first is orders.forward[-1] else None

    # Forward

    def _forward_reads(self, unit: Unit) -> Reads:
        has_grad = torch.is_grad_enabled() or (self._pass_depth > 0 and self._pass_has_grad)
        stays = unit.is_root or not self._reshard_after_forward
        return Reads.BOTH if has_grad and stays else Reads.FORWARD

    def open_pass(self) -> None:
        """The root module's forward begins."""
        self._pass_depth += 1
        if self._pass_depth > 1:
            return
        if self._in_backward:
            self._abandon_backward()
        if self._agreed is not None:
            self._use(self._agreed)
            self._agreed = None
        self.pass_id += 1
        self._pass_has_grad = torch.is_grad_enabled()
        self._num_open_passes += self._pass_has_grad
        self._forward.next = 0

    def close_pass(self) -> None:
        """The root module's forward is over, or has raised."""
        self._pass_depth = max(self._pass_depth - 1, 0)
        if self._pass_depth == 0 and not self.is_pinned:
            self._forward.finish(self._let_go_after_forward, waits=True)
            # Without grad, nothing else frees what was gathered out of turn.
            for unit in self.units:
                self._let_go_after_forward(unit)

    def before_forward(self, unit: Unit, *, is_recompute: bool) -> None:
        """Have the unit's parameters; start the next one's gather."""
        if unit.state is UnitState.GATHERED and self.is_pinned:
            return
        if is_recompute:
            self.note_recomputation(unit)
            self._enter(unit)
        else:
            self._note(unit, "forward")
            self._forward.advance_to(unit, self._prefetch, self._let_go_after_forward)
        if self._pass_has_grad and not torch.is_grad_enabled() and not is_recompute:
            unit.num_expected_recomputes += 1
        self.note_peaks()

    def note_recomputation(self, unit: Unit) -> None:
        """Backward runs (a part of) the unit's forward again."""
        unit.recomputes = True
        self._note(unit, "recomputed")

    def note_detached(self, unit: Unit) -> None:
        """A forward gave outputs that need no grad, in a pass that has some."""
        if self._pass_has_grad:
            self._note(unit, "detached")

    def after_forward(self, unit: Unit) -> None:
        """Free the unit, if the policy says so."""
        if not self.is_pinned:
            self._let_go_after_forward(unit)

    def _let_go_after_forward(self, unit: Unit) -> None:
        # An evaluation may come between a forward and its backward, which nothing gathers it for.
        if not self._reshard_after_forward or unit.kept_for_backward:
            return
        if not torch.is_grad_enabled() or not (unit.is_root or unit is self._turning_point):
            unit.free()
        elif not unit.is_root and not unit.recomputes:
            unit.free_what_only_forward_reads()

    # Backward

    def enter_backward(self) -> None:
        """Note that a backward runs, and have `_end_backward` called at its end."""
        if self._in_backward:
            return
        self._in_backward = True
        self._num_reduced = 0
        self._gradients_unwanted = False
        self._begin_gradient_window()
        _queue_callback(self._end_backward)

    def _begin_gradient_window(self) -> None:
        # With no gradient waiting for the optimizer, what was used before is stepped or discarded.
        spaces = [space for unit in self.units for space in unit.trainable_spaces]
        if any(u.tensor.grad is not None for space in spaces for u in space.update_tensors):
            return
        for space in spaces:
            for slot in space.slots:
                slot.was_used = slot.is_written

    def note_unwanted_gradient(self) -> None:
        """This backward is a ``torch.autograd.grad`` that does not ask for some parameter."""
        self._gradients_unwanted = True

    def before_backward(self, unit: Unit, pass_id: int) -> None:
        """Have the unit's parameters for its backward; start the next one's gather."""
        self.enter_backward()
        self._note(unit, "backward")
        if self._swept_pass != pass_id:
            if self._swept_pass is not None:
                self._backward.finish(self._let_go_in_backward, waits=False)
            self._swept_pass = pass_id
            self._backward.next = 0
        self._enter(unit)
        self.note_peaks()

    def _enter(self, unit: Unit) -> None:
        self._entered.add(unit)
        if self.is_synchronizing and self._in_backward:
            self._reduce_due_units(self._backward.position.get(unit, -1))
        if not self.is_pinned:
            self._backward.advance_to(unit, self._prefetch, self._let_go_in_backward)

    def _let_go_in_backward(self, unit: Unit) -> None:
        # One whose backward may come late is not gathered a second time, which no peer would join.
        is_awaited = unit.num_pending_backwards > 0 and unit not in self._entered
        if not (unit.kept_for_backward or is_awaited):
            unit.free()

    def after_backward(self, unit: Unit, *, is_certain: bool = True) -> None:
        """The backward of one of the unit's calls is over: free it, and reduce what is complete.

        Args:
            unit: The unit.
            is_certain: False if an input is a leaf (as in reentrant checkpoints): its gradient may
                be complete before those of the unit's own leaves. The running graph's end is then
                waited for.
        """
        self.enter_backward()
        if is_certain:
            self._leave_unit(unit)
        else:
            _queue_callback(lambda: self._leave_unit(unit))

    def _leave_unit(self, unit: Unit) -> None:
        if not self._in_backward:
            return
        unit.num_pending_backwards -= 1
        if unit.is_complete:
            self._note(unit, "reduction")
        if not self.is_pinned and not unit.is_root and not unit.kept_for_backward:
            unit.free()
        if self.is_synchronizing:
            self._reduce_due_units()

    def _reduce_due_units(self, position: int = -1) -> None:
        """Reduce, in order, what is complete or was passed over by the unit at ``position``.

        A unit whose output did not reach the loss gets no gradient, though its forward ran.
        """
        while self._num_reduced < len(self._reduction):
            unit = self._reduction[self._num_reduced]
            is_passed_over = (
                self._num_open_passes == 1
                and unit not in self._entered
                and self._backward.position.get(unit, position) < position
            )
            if unit.is_root or not (unit.is_complete or is_passed_over):
                return
            self._reduce(unit)
            self._num_reduced += 1

    def _reduce(self, unit: Unit, *, waits: bool = True) -> None:
        # A unit that this rank skips: its peers gather it before they reduce it, and wait for us.
        if self._swept_pass is not None and not self.is_pinned:
            position = self._backward.position.get(unit, -1)
            while self._backward.next <= position:
                self._backward.drop_what_is_there(self._let_go_in_backward)
                self._backward.start(1)
        self.note_peaks()
        self._take_reductions(waits=waits)
        for space in unit.trainable_spaces:
            space.reduce()
        self._in_flight.append(unit)

    def _take_reductions(self, *, waits: bool) -> None:
        for unit in self._in_flight:
            spaces = unit.trainable_spaces
            may_wait = waits and unit in self._entered
            if not may_wait and not all(space.is_summed for space in spaces):
                break
            for space in spaces:
                space.sum_over_shards()
                if space.is_reduced:
                    space.finish_reduction()

    def _finish_reductions(self) -> None:
        for unit in self._in_flight:
            for space in unit.trainable_spaces:
                space.sum_over_shards()
        for unit in self._in_flight:
            for space in unit.trainable_spaces:
                space.finish_reduction()
        self._in_flight.clear()

    def _end_backward(self) -> None:
        reduces = self.is_synchronizing and self._has_gradients()
        for unit in self._reduction[self._num_reduced :] if reduces else ():
            self._reduce(unit, waits=False)
        if not self.is_pinned:
            self._backward.finish(self._let_go_in_backward, waits=False)
        if reduces:
            # Gradients that came after their unit's reduction (graphs that hide a use of the unit).
            for unit in self._reduction:
                if any(slot.is_written for slot in unit.slots):
                    self._reduce(unit)
            self._finish_reductions()
            self.on_reduced()
        self._close_backward()
        if self._seen is not None:
            self._agreed = self._agree_on_orders(self._seen)
            self._seen = None

    def _has_gradients(self) -> bool:
        # torch.autograd.grad() runs the hooks too, but asks for no parameter's gradient.
        return not self._gradients_unwanted or any(
            slot.is_written for unit in self._reduction for slot in unit.slots
        )

    def _close_backward(self) -> None:
        self._in_backward = False
        self._swept_pass = None
        self._entered.clear()
        self._num_open_passes = 0
        for unit in self.units:
            unit.forget_calls()
        self.free_all()

    def _abandon_backward(self) -> None:
        """A backward has raised: forget it."""
        self._finish_reductions()
        self._backward.next = len(self._backward.order)
        self._backward.ahead.clear()
        self._close_backward()

    def free_all(self, *, spares_kept: bool = False) -> None:
        """Free every unit that nothing pins.

        Args:
            spares_kept: Leave units that nothing would gather again for a backward to come.
        """
        if not self.is_pinned:
            for unit in self.units:
                if not (spares_kept and unit.kept_for_backward):
                    unit.free()

    @property
    def is_mid_step(self) -> bool:
        """Whether a forward with grad is waiting for its backward."""
        return self._pass_depth > 0 or self._in_backward

    def gather_all(self) -> None:
        """Gather every unit."""
        for unit in self.units:
            unit.gather(Reads.BOTH)
        for unit in self.units:
            unit.wait(Reads.BOTH)
        self.note_peaks()

    # Notes

    def _note(self, unit: Unit, phase: str) -> None:
        if self._seen is not None:
            seen: list[Unit] = getattr(self._seen, phase)
            if unit not in seen:
                seen.append(unit)

    def note_peaks(self) -> None:
        """Raise the peaks in the stats to what is allocated now."""
        stats = self._stats
        gathered = [unit for unit in self.units if unit.state is not UnitState.SHARDED]
        stats.peak_gathered_units = max(stats.peak_gathered_units, len(gathered))
        stats.peak_gathered_bytes = max(
            stats.peak_gathered_bytes, sum(unit.gathered_bytes for unit in gathered)
        )
        stats.peak_gradient_bytes = max(
            stats.peak_gradient_bytes,
            sum(s.gradient_bytes for unit in self.units for s in unit.trainable_spaces),
        )
