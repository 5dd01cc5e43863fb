"""Describes the numbers in a ring's slots: groups, channels, labels, stacks and call sites, each once.

Look-ups take no lock; new descriptions are added under one. A description stays in the ring as long as a record needs
it. If there are too many, the others are dropped, and described again when they are called again.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, Final

from disttrain.flight_recorder.record.process.symbols import Symbols
from disttrain.flight_recorder.record.ring import layout

if TYPE_CHECKING:
    from types import CodeType

    import torch

    from disttrain.flight_recorder.record.process.callers import Callers
    from disttrain.flight_recorder.record.ring.ring import Ring
    from disttrain.process_group import World
    from disttrain.process_group.interfaces import GroupLike

MAX_SITES: Final = 8192
"""The number of call sites and stacks that are known at a time; those beyond are learnt anew."""
_NUM_UNDER_WAY: Final = 64
_STACK: Final = 8
"""The index of a site's stack in its entry."""
_MAX_ERROR_CHARS: Final = 500


class Site:
    """The part of a call site that the hot path needs.

    Attributes: `codes`, of its callers; `number`; `counter`, the word of its group's or channel's; `messages`, what
    numbers messages; `following`, the site that was called after it last, which a loop calls after it again.
    To be known at once, a site with eight callers has `code` and `offset`, those of the innermost, the `shape` that is
    asked for, and `key`, the rest: what else is asked for, the other offsets and codes. One that disttrain calls itself
    has more `callers`, each with its offset, and `arguments`, all that is asked for.
    """

    __slots__ = (
        *("arguments", "callers", "code", "codes", "counter", "following", "key", "messages", "number", "offset"),
        "shape",
    )

    def __init__(self, codes: list[CodeType], number: int, counter: int, messages: itertools.count[int] | None) -> None:
        self.codes = codes
        self.number = number
        self.counter = counter
        self.messages = messages
        self.code: CodeType | None = None
        self.offset = -1
        self.shape: Any = None
        self.key: tuple[Any, ...] = ()
        self.callers: Sequence[tuple[CodeType, int]] = ()
        self.arguments: tuple[Any, ...] | None = None
        self.following: Site = self

    def forget(self) -> None:
        """Forgets the site: its number has no meaning from now on."""
        self.code = self.arguments = None
        self.following = self


class Descriptions:
    """Describes groups, channels, stacks and call sites in `ring`. `sites` are the call sites by what is asked for and
    the offsets of their callers.

    Several stacks may have equal offsets and different code.
    """

    def __init__(self, ring: Ring) -> None:
        self.sites: dict[tuple[Any, ...], list[Site]] = {}
        self.world: World | None = None
        """The world whose groups are kept, also when no record is of them."""
        self._listings: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._ring = ring
        self._lock = threading.Lock()
        self._num_sites = 0
        self._stacks: dict[tuple[int, ...], tuple[int, Callers]] = {}
        self._groups: dict[str, tuple[Any, ...]] = {}
        self._channels: dict[tuple[str, str, int], tuple[itertools.count[int], tuple[Any, ...]]] = {}
        self._labels: dict[tuple[str, str], tuple[Any, ...]] = {}
        self._described: dict[int, tuple[Any, ...]] = {}
        self._next_number = itertools.count(1)
        self._symbols = Symbols()
        self._lasting: list[tuple[Any, ...]] = []

    def keep(self, *entry: Any) -> None:
        """Add an entry about this process, to stay."""
        with self._lock:
            self._lasting.append(entry)
            self._ring.describe(*entry)

    @property
    def listings(self) -> list[Any]:
        """The recorded steps that may still be replayed, as `listing.Listing`: what their `numbers` name is kept."""
        # By their references, which are listed in one step: the watchdog asks while another thread adds.
        return [listing for each in self._listings.valuerefs() if (listing := each()) is not None]

    def keep_for(self, listing: Any) -> None:
        """Keep what this recorded step names, as long as it may be replayed."""
        self._listings[id(listing)] = listing

    def failed(self, number: int, error: BaseException) -> None:
        """Say why record `number` has failed."""
        with self._lock:
            if self._ring.is_full:
                self._forget()
            self._ring.describe("error", number, str(error)[:_MAX_ERROR_CHARS])

    def content(self) -> bytes:
        """The ring at this moment."""
        with self._lock:
            return self._ring.content()

    def called_at(self, site: int) -> tuple[tuple[Any, ...], str] | None:
        """The ring's entry of the group, and the operation, of a call site by its number; None when it is forgotten."""
        entry = self._described.get(site)
        return None if entry is None or entry[0] != "site" else (self._groups[entry[2]], entry[3])

    def label(self, action: str, module: str) -> int:
        """The number of a label."""
        if (numbered := self._labels.get((action, module))) is not None:
            return int(numbered[1])
        with self._lock:
            entry = self._labels.get((action, module))
            if entry is None:
                number = next(self._next_number) if action or module else 0
                entry = self._labels[action, module] = self._describe("label", number, action, module)
                if len(self._labels) > MAX_SITES or self._ring.is_full:
                    self._forget()
            return int(entry[1])

    def part(self, graph: int, index: int, num_parts: int, calls: Sequence[tuple[int, int, int]]) -> int:
        """The number of a new part of a recorded step. `calls`: place, site and label of each."""
        with self._lock:
            entry = self._describe("part", next(self._next_number), graph, index, num_parts, calls)
            return int(entry[1])

    def site(
        self,
        key: tuple[Any, ...],
        group: GroupLike,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        callers: Callers,
    ) -> Site:
        """The call site of a key in `sites`, learnt where it is new. Keys begin with operation, group, peer, how."""
        codes, _ = callers
        for site in self.sites.get(key, ()):
            if site.codes == codes:
                return site
        operation, group_name, peer_rank, how = key[:4]
        with self._lock:
            if self._num_sites > MAX_SITES or self._ring.is_full:
                self._forget()
            counter, messages = self._counter(operation, group, peer_rank)
            entry = self._describe(
                *("site", next(self._next_number), group_name, operation),
                *(tuple(tuple(tensor.shape) for tensor in tensors) for tensors in (inputs, outputs)),
                tuple(dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in inputs or outputs)),
                None if peer_rank is None else group.members[peer_rank],
                self._stack(callers),
                how if isinstance(how, str) else "",
                how if isinstance(how, tuple) else None,
            )
            site = Site([*codes], entry[1], counter, messages)
            # A new list: another thread may be going through the old one.
            self.sites[key] = [*self.sites.get(key, ()), site]
            self._num_sites += 1
            return site

    def _stack(self, callers: Callers) -> int:
        """The number of a stack."""
        # By the addresses of its instructions, as long as its code is held.
        addresses = tuple([id(code) + offset for code, offset in zip(*callers, strict=True)])
        entry = self._stacks.get(addresses)
        if entry is None:
            entry = self._stacks[addresses] = next(self._next_number), callers
            self._describe("stack", entry[0], self._symbols.stack(callers))
        return entry[0]

    def _counter(
        self, operation: str, group: GroupLike, peer_rank: int | None
    ) -> tuple[int, itertools.count[int] | None]:
        name = group.group_name
        if not self._ring.has_counters:
            self._forget()
        if name not in self._groups:
            self._groups[name] = ("group", name, group.members.plain(), group.axis_name, self._ring.counter())
            self._ring.describe(*self._groups[name])
        if operation not in ("send", "recv"):
            return self._groups[name][4], None
        if peer_rank is None:
            return layout.COUNTERS_AT // 8, None
        channel = self._channels.get((name, operation, peer_rank))
        if channel is None:
            entry = ("channel", name, operation, group.members[peer_rank], self._ring.counter())
            channel = self._channels[name, operation, peer_rank] = (itertools.count(1), entry)
            self._ring.describe(*entry)
        return channel[1][4], channel[0]

    def _forget(self) -> None:
        """Keep the descriptions that the ring's records need; what is called again is learnt again."""
        numbers = {number for slot in self._ring.slots() for number in slot[1:3]}
        # What has been described just now may be on its way into a slot.
        newest = next(self._next_number)
        numbers.update(range(newest - _NUM_UNDER_WAY, newest))
        described = self._described
        for listing in self.listings:
            numbers.update(listing.numbers)
        parts = [entry for number, entry in described.items() if number in numbers and entry[0] == "part"]
        numbers.update(number for *_, calls in parts for _, *its in calls for number in its)
        sites = [entry for number, entry in described.items() if number in numbers and entry[0] == "site"]
        numbers.update(entry[_STACK] for entry in sites)
        self._described = {number: entry for number, entry in described.items() if number in numbers}
        if self.world is not None:
            self._forget_groups({*(entry[2] for entry in sites), *(group.group_name for group in self.world.groups)})
        channels = (entry for _, entry in self._channels.values())
        self._ring.replace([*self._lasting, *self._groups.values(), *channels, *self._described.values()])
        for site in itertools.chain.from_iterable(self.sites.values()):
            site.forget()
        self.sites.clear()
        self._num_sites, self._stacks, self._labels = 0, {}, {}
        self._symbols = Symbols()

    def _forget_groups(self, named: AbstractSet[str]) -> None:
        """Forgets all groups but those that are `named`: the others have been destroyed, and no record is of them."""
        gone = [entry for name, entry in self._groups.items() if name not in named]
        gone += [entry for (name, *_), (_, entry) in self._channels.items() if name not in named]
        self._groups = {name: entry for name, entry in self._groups.items() if name in named}
        self._channels = {key: channel for key, channel in self._channels.items() if key[0] in named}
        for entry in gone:
            self._ring.release(entry[4])

    def _describe(self, *entry: Any) -> tuple[Any, ...]:
        """Add an entry that stays for as long as a record needs it. Returns: the entry."""
        self._described[entry[1]] = entry
        self._ring.describe(*entry)
        return entry
