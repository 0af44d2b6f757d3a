"""State that the host keeps, and that steps change which only the device knows to be skipped.

The step counts of most optimizers are in host memory. Where a step may be skipped, the device
counts for itself, so that the host need not wait to know. The host goes on as if no step were
skipped; copies of the device's numbers follow, and are looked at when they have arrived. A skipped
step shows up in the host's state one or two steps late, and at once, with a wait, in ``settle``.

What the user changes in the meantime (in place, or by ``load_state_dict``) is what the device goes
on from.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mpcompile.runtime.machines import Machine, Reading

if TYPE_CHECKING:
    from mpcompile.runtime.table import Rows

LATE, SEEN, NEXT = "late.", "number.seen.", "number.next."
"""Prefixes: the device's number; what the host's was before a launch, and what it is after it."""

_ATTRIBUTE = "_mpcompile_late"
"""Where an optimizer has the late state that its last launch left behind."""


def settle(optimizer: torch.optim.Optimizer) -> None:
    """Make the state of ``optimizer`` true on the host; this waits for the device if need be."""
    late: LateState | None = vars(optimizer).get(_ATTRIBUTE)
    if late is not None and late.is_of(optimizer):
        late.settle()


def is_late_elsewhere(optimizer: torch.optim.Optimizer, late: LateState | None) -> bool:
    """Whether the last launch on the state of ``optimizer`` was not one of ``late``."""
    return vars(optimizer).get(_ATTRIBUTE, late) is not late


@dataclass
class _Slot:
    """A number in the state of a parameter, and the device's.

    ``holder`` is a 0-dim tensor of the host, or the dict that has a Python number at ``key``.
    """

    holder: Any
    key: str
    place: torch.Tensor

    def read(self) -> float:
        """Return what the host has."""
        return float(
            self.holder if isinstance(self.holder, torch.Tensor) else self.holder[self.key]
        )

    def write(self, number: float) -> None:
        """Replace what the host has, in the type that it has."""
        if isinstance(self.holder, torch.Tensor):
            self.holder.fill_(number)
        else:
            self.holder[self.key] = type(self.holder[self.key])(number)


Entry = tuple[dict[str, Any], str]
"""The state of a parameter, and a key of it."""


def _holder_of(entry: Entry) -> tuple[Any, str]:
    state, key = entry
    value = state[key]
    return (value, "") if isinstance(value, torch.Tensor) else (state, key)


class LatePart:
    """The late state of one table: a column of the table for each kind of entry."""

    def __init__(
        self, late: LateState, rows: Rows, slots: Sequence[int], places: Sequence[tuple[int, str]]
    ) -> None:
        """``places`` are row and key of each of ``slots``."""
        self.late = late
        self.slots = torch.tensor(slots, dtype=torch.int64)
        width, names = len(rows.kernel.numbers), list(rows.kernel.numbers)
        self._seen, self._next = (
            torch.tensor([row * width + names.index(prefix + key) for row, key in places])
            for prefix in (SEEN, NEXT)
        )
        address, count = rows.numbers_out.buffer_info()
        memory = (ctypes.c_double * count).from_address(address)
        self._numbers = torch.frombuffer(memory, dtype=torch.float64)
        self._keep = rows

    @property
    def seen(self) -> torch.Tensor:
        """What the host had before its last advance."""
        return self._numbers[self._seen]

    @property
    def next(self) -> torch.Tensor:
        """What the host has after it."""
        return self._numbers[self._next]


class LateState:
    """The late state of one optimizer, for all its tables.

    A slot is a number; the host believes in one for each, which is the device's unless a step was
    skipped since.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, machine: Machine) -> None:
        self._optimizer, self._machine = weakref.ref(optimizer), machine
        self._slots: list[_Slot] = []
        self._known: dict[tuple[int, str], int] = {}
        self._blocks: list[torch.Tensor] = []
        self._believed = torch.empty(0, dtype=torch.float64)
        self._coming: tuple[Reading, torch.Tensor] | None = None
        self._since: list[Callable[[], None]] = []
        self._is_settled = True
        optimizer.register_state_dict_pre_hook(settle)

    def is_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this is the state of ``optimizer``, not of one that it is a copy of."""
        return self._optimizer() is optimizer

    def slots_for(self, entries: Sequence[Entry]) -> list[int]:
        """Return the slot of each of ``entries``; new ones hold what the host has."""
        found = [_holder_of(entry) for entry in entries]
        new = [(h, key) for h, key in found if (id(h), key) not in self._known]
        if new:
            made = [_Slot(holder, key, torch.empty(0)) for holder, key in new]
            numbers = torch.tensor([slot.read() for slot in made], dtype=torch.float64)
            block = self._machine.staged(numbers).to(self._machine.device, non_blocking=True)
            self._blocks.append(block)
            self._believed = torch.cat([self._believed, numbers])
            for slot, place in zip(made, block.unbind(), strict=True):
                self._known[id(slot.holder), slot.key] = len(self._slots)
                slot.place = place
                self._slots.append(slot)
        return [self._known[id(holder), key] for holder, key in found]

    def place(self, slot: int) -> torch.Tensor:
        """Return the device's number of ``slot``, a 0-dim tensor."""
        return self._slots[slot].place

    def begin(self) -> None:
        """Look at the device's numbers if they have arrived; a launch comes next."""
        if self._machine.is_capturing() or self._coming is None:
            return
        reading, believed = self._coming
        if not reading.has_arrived():
            return
        self._coming = None
        if not torch.equal(reading.values, believed) and self._is_as_believed():
            self._write(range(len(believed)), reading.values)
            self._believed[: len(believed)] = reading.values
            for replay in self._since:
                replay()

    def _is_as_believed(self) -> bool:
        """Whether the user has left everything alone since the last launch."""
        now = torch.tensor([slot.read() for slot in self._slots], dtype=torch.float64)
        return torch.equal(now, self._believed)

    def advance(self, part: LatePart, replay: Callable[[], None]) -> None:
        """Note that the host has gone on by the step that ``part`` is launched for.

        ``replay`` does so again, from what it has then.
        """
        seen, believed = part.seen, self._believed[part.slots]
        if not torch.equal(seen, believed):
            self._take(part.slots[seen != believed], seen[seen != believed])
        self._believed[part.slots] = part.next
        self._since.append(replay)
        self._is_settled = False

    def note_replay(self, part: LatePart) -> None:
        """Note that the host has gone on by a step again."""
        self._believed[part.slots] = part.next

    def _take(self, slots: torch.Tensor, numbers: torch.Tensor) -> None:
        """Have the device go on from what the user has put in place."""
        self._coming = None
        for slot, number in zip(slots.tolist(), numbers.tolist(), strict=True):
            self._slots[slot].place.fill_(number)

    def end(self) -> None:
        """Have the device's numbers follow, after a launch."""
        optimizer = self._optimizer()
        if optimizer is not None:
            vars(optimizer)[_ATTRIBUTE] = self
        self._machine.keep_for_stream(self._blocks)
        if self._coming is None and not self._machine.is_capturing():
            self._coming = (self._machine.read_later(self._now()), self._believed.clone())
            self._since = []

    def _now(self) -> torch.Tensor:
        return self._blocks[0] if len(self._blocks) == 1 else torch.cat(self._blocks)

    def settle(self) -> None:
        """Make the host's state true; this waits for the device if there was a launch."""
        if self._is_settled:
            return
        with self._machine.waiting():
            numbers = self._now().cpu()
        wrong = (numbers != self._believed).nonzero().flatten().tolist()
        as_left = [s for s in wrong if self._slots[s].read() == float(self._believed[s])]
        self._write(as_left, numbers)
        self._believed[as_left] = numbers[as_left]
        self._coming, self._since, self._is_settled = None, [], True

    def _write(self, slots: Sequence[int], numbers: torch.Tensor) -> None:
        values = numbers.tolist()
        for slot in slots:
            self._slots[slot].write(values[slot])
