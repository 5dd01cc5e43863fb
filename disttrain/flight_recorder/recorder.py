"""The recorder: keeps the last operations of this process in a ring.

It runs at every call of every layer, so the hot path takes no lock, makes no text and holds no tensor: what a call asks
for and where it comes from is looked up, and the ring gets a few numbers. Only what is new is described.

Stacks, code objects and offsets in them, are compared as lists and not hashed: a code object's hash takes a
microsecond, a comparison with itself nothing. Of two files with the same code on the same lines, the first is named.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from disttrain.errors import FlightDumpError
from disttrain.flight_recorder import ring_layout as layout
from disttrain.flight_recorder.device_marks import Cuda, DeviceMarks
from disttrain.flight_recorder.dump_words import rank_name
from disttrain.flight_recorder.header import ring_header
from disttrain.flight_recorder.ring import Ring
from disttrain.flight_recorder.symbols import PACKAGE, Symbols
from disttrain.garbage import uncollected

if TYPE_CHECKING:
    from disttrain.errors import DisttrainError
    from disttrain.flight_recorder.dump import Dump
    from disttrain.process_group import ProcessGroup, World

_log = logging.getLogger(__name__)

_MAX_ERROR_CHARS: Final = 500
MAX_SITES: Final = 8192
"""How many call sites and stacks are known at a time; those beyond are learnt anew."""
_NUM_UNDER_WAY: Final = 64
_JOB_KEY: Final = "flight_recorder/job"

_getframe: Final = sys._getframe
_now_ns: Final = time.monotonic_ns
_pack_into: Final = layout.BEGUN_SLOT.pack_into
_SLOT_BYTES: Final = layout.SLOT.size
_SLOT_WORDS: Final = layout.SLOT_WORDS
_ENDED_WORD: Final = layout.ENDED_WORD

_DEPTH: Final = 3
"""From `begin` to who called the collective: `issue` and the collective are ours; only a frame asked for costs."""

_Site = tuple[list[Any], int, int, Any]
"""What the hot path needs of a call site: its stack as code object, offset, code object, offset, ..., innermost first;
its number; the counter of its group or channel; what numbers messages. A named tuple takes longer to be taken apart."""
_NO_SITES: Final[list[_Site]] = [([None], 0, 0, None)]
"""No stack is like this one."""


class FlightRecorder:
    """Keeps the last `num_records` operations of this process, each with its innermost `num_frames` Python frames.

    Of calls that disttrain makes itself, for a sharded module say, it keeps three times as many: the user's are deeper.
    With `marks_device`, dumps also tell when a GPU came to each operation that it carries out, and left it.
    `attach` it to a world, then `dump` at any time, from any thread.
    """

    def __init__(self, num_records: int = 2000, num_frames: int = 8, *, marks_device: bool = True) -> None:
        self._num_records = num_records
        self._num_frames = num_frames
        self._marks_device = marks_device
        self._frames_to_keep: dict[str, range] = {}
        self._lock = threading.Lock()
        self._sites: dict[tuple[Any, ...], list[_Site]] = {}
        self._num_sites = 0
        self._stacks: dict[tuple[int, ...], tuple[int, list[Any]]] = {}
        self._groups: dict[str, tuple[Any, ...]] = {}
        self._channels: dict[tuple[str, str, int], tuple[itertools.count[int], tuple[Any, ...]]] = {}
        self._labels: dict[tuple[str, str], tuple[Any, ...]] = {}
        self._described: dict[int, tuple[Any, ...]] = {}
        self._label: tuple[str, str, int] = ("", "", 0)
        self._next_number = itertools.count(1)
        self._world: World | None = None
        self._marks: DeviceMarks | None = None
        self._symbols = Symbols()
        self._header: dict[str, Any] = {}
        self._closing: list[Callable[[], None]] = []
        self._lasting: list[tuple[Any, ...]] = []
        self._use(Ring(num_records))

    @property
    def ring(self) -> Ring:
        """Where the records are."""
        return self._ring

    @property
    def world(self) -> World:
        """Whose operations are recorded. Raises FlightDumpError before `attach`."""
        if self._world is None:
            raise FlightDumpError("dump", "the recorder does not know its rank yet.", "Call attach(world) first.")
        return self._world

    @property
    def job(self) -> str:
        """The name that the ranks of this world have drawn together; files of theirs have it in their names."""
        return str(self._header["job"])

    @property
    def name(self) -> str:
        """How the files of this rank begin: `rank-00003.` and the job's name."""
        return rank_name(self.world.rank, self.job)

    def attach(self, world: World, folder: Path | None = None, dumps: Path | None = None) -> None:
        """Record `world`'s operations from now on, in place of another recorder, which is closed.

        With `folder`, on a disk of this machine's own or in its memory, the ring is a file there, so that it is left
        when the process is killed; in `dumps`, if that is another folder, a link leads to it. Every rank that attaches
        does so before its first operation. Raises OSError when the file cannot be made.
        """
        if self._world is not world:
            job = world.store.compare_set(_JOB_KEY, "", uuid.uuid4().hex[:8]).decode()
            self._header = ring_header(world, job)
            is_marked = self._marks_device and world.device.type == "cuda"
            self._marks = DeviceMarks(self._num_records, Cuda()) if is_marked else None
            if folder is not None:
                name = f"{rank_name(world.rank, job)}{layout.SUFFIX}"
                link = None if dumps is None or dumps == folder else dumps / name
                self._use(Ring(self._num_records, folder / name, link))
            self._world = world
            self.describe("ring", self._header)
        previous, world.recorder = world.recorder, self
        if previous is not None and previous is not self:
            previous.close()

    def close(self) -> None:
        """The world is over: its ring is nobody's any more. What has been recorded can still be dumped."""
        closing, self._closing = self._closing, []
        for close in (*closing, self._ring.close):
            try:
                close()
            except OSError as problem:  # of a file that goes anyway; the world's end goes on
                _log.warning("the flight recorder cannot let go of a file: %s", str(problem))

    def when_closed(self, close: Callable[[], None]) -> None:
        """Call `close` when the world is over."""
        self._closing.append(close)

    def detach(self) -> None:
        """Record no more; what has been recorded can still be dumped."""
        if self._world is not None and self._world.recorder is self:
            self._world.recorder = None

    def describe(self, *entry: Any) -> None:
        """Add an entry about this process to the ring, to stay."""
        with self._lock:
            self._lasting.append(entry)
            self._ring.describe(*entry)

    def called_at(self, site: int) -> tuple[tuple[Any, ...], str] | None:
        """The ring's entry of the group, and the operation, of a call site by its number; None when it is forgotten."""
        entry = self._described.get(site)
        return None if entry is None else (self._groups[entry[2]], entry[3])

    def begin(
        self,
        operation: str,
        group: ProcessGroup,
        sequence: int,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        peer_rank: int | None,
    ) -> tuple[int, int, int]:
        """Record a call that is about to be handed to its transport. Returns: its number, and where its slot is."""
        stack: list[Any] = []
        address = 0
        if self._num_frames:
            try:
                frame: Any = _getframe(_DEPTH)
            except ValueError:
                frame = _getframe(1)
            code = frame.f_code
            # The instruction's address: whoever holds the stack keeps the code there.
            address = id(code) + frame.f_lasti
            file = code.co_filename
            for _ in self._frames_to_keep.get(file) or self._frames_of_file(file):
                stack += (frame.f_code, frame.f_lasti)
                frame = frame.f_back
                if frame is None:
                    break
        if len(inputs) == 1 and len(outputs) == 1:
            tensor, output = inputs[0], outputs[0]
            brought = None if output is tensor else output.shape
            key: Any = operation, group.group_name, peer_rank, address, tensor.shape, tensor.dtype, brought
        else:
            shapes = tuple([tensor.shape for tensor in inputs]), tuple([tensor.shape for tensor in outputs])
            dtypes = tuple([tensor.dtype for tensor in inputs or outputs])
            key = operation, group.group_name, peer_rank, address, *shapes, dtypes
        site_stack, site_number, counter, messages = self._sites.get(key, _NO_SITES)[0]
        if site_stack != stack:
            _, site_number, counter, messages = self._other_site(key, group, inputs, outputs, stack)
        if not sequence and messages is not None:
            sequence = next(messages)
        world = group.world
        action, module, label = self._label
        if world.action is not action or world.module is not module:
            label = self._new_label(world.action, world.module)
        record = number, slot, _ = self._next_place()
        self._words[counter] = sequence
        now_ns = _now_ns()
        if self._marks is not None:
            self._marks.came(number, now_ns, inputs or outputs, group)
        _pack_into(self._memory, slot, number, site_number, label, sequence, now_ns, number)
        return record

    def waits(self, record: tuple[int, int, int]) -> None:
        """Record that the host begins to wait for the call of `record`: not at once, as for most, but later."""
        words = self._words
        number, _, word = record
        if words[word] == number:
            since_us = (_now_ns() - words[word + layout.BEGAN_WORD]) // 1000
            words[word + layout.SEQUENCE_WORD] |= min(max(since_us, 1), layout.MAX_WAITS) * layout.WAITS_UNIT
            if self._marks is not None:
                self._marks.waits(number)

    def end(self, record: tuple[int, int, int], error: DisttrainError | None) -> None:
        """Record that the host has waited for the call of `record`, unless another has got its slot."""
        words = self._words
        number, _, word = record
        if words[word] == number:
            if error is not None:
                with self._lock:
                    if self._ring.is_full:
                        self._forget()
                    self._ring.describe("error", number, str(error)[:_MAX_ERROR_CHARS])
                words[word + layout.SEQUENCE_WORD] |= layout.FAILED_BIT
            elif self._marks is not None:
                self._marks.left(number)
            words[word + _ENDED_WORD] = _now_ns()

    def content(self) -> bytes:
        """The ring at this moment."""
        with self._lock:
            return self._ring.content()

    def snapshot(self, reason: str, error: BaseException | None = None, *, device_is_busy: bool | None = None) -> Dump:
        """What has been recorded so far, as a value. Raises FlightDumpError before `attach`."""
        # Here: what reads rings takes longer to load than all of a world's start.
        from disttrain.flight_recorder.snapshot import take_snapshot

        with uncollected():
            content = self.content()
            marked_ns = {} if self._marks is None else self._marks.read()
            return take_snapshot(self.world, content, marked_ns, reason, error, device_is_busy=device_is_busy)

    def dump(
        self,
        path: Path | str,
        reason: str = "asked for",
        error: BaseException | None = None,
        *,
        device_is_busy: bool | None = None,
    ) -> Path:
        """Write what has been recorded to `path`, whole or not at all, for its owner's eyes only (mode 0600).

        Args:    path  a file, or a folder that is there: the file is then named after job and rank;
                 error  the exception that ends this process, if one does;
                 device_is_busy  whether its GPU has not come to the end of what is queued, if somebody has looked.
        Returns: the file. Raises: OSError when it cannot be written, FlightDumpError before `attach`.
        """
        from disttrain.flight_recorder.dump import dump_name, write_dump  # as above

        with uncollected():
            dump = self.snapshot(reason, error, device_is_busy=device_is_busy)
            file = Path(path)
            if file.is_dir():
                file /= dump_name(dump)
            write_dump(file, dump)
        return file

    def _use(self, ring: Ring) -> None:
        self._ring = ring
        self._memory, self._words = ring.memory, ring.words
        self._slots_at = ring.slots_at
        slots = range(ring.slots_at, ring.slots_at + _SLOT_BYTES * ring.num_slots, _SLOT_BYTES)
        words = range(ring.first_word, ring.first_word + _SLOT_WORDS * ring.num_slots, _SLOT_WORDS)
        # One call for a number and its place: threads may come here together.
        self._next_place = zip(itertools.count(), itertools.cycle(slots), itertools.cycle(words)).__next__

    def _frames_of_file(self, file: str) -> range:
        """As many frames as to keep for calls from `file`; looked up once for each."""
        frames = range(3 * self._num_frames if file.startswith(PACKAGE) else self._num_frames)
        self._frames_to_keep[file] = frames
        return frames

    def _new_label(self, action: str, module: str) -> int:
        with self._lock:
            entry = self._labels.get((action, module))
            if entry is None:
                number = next(self._next_number) if action or module else 0
                entry = self._labels[action, module] = self._describe("label", number, action, module)
                if len(self._labels) > MAX_SITES or self._ring.is_full:
                    self._forget()
            label: int = entry[1]
            self._label = (action, module, label)
            return label

    def _other_site(
        self,
        key: tuple[Any, ...],
        group: ProcessGroup,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        raw: list[Any],
    ) -> _Site:
        """Find a call site, or learn and describe it: its group, channel, stack and itself, as far as they are new."""
        for site in self._sites.get(key, ()):
            if site[0] == raw:
                return site
        operation, group_name, peer_rank = key[:3]
        with self._lock:
            if self._num_sites > MAX_SITES or self._ring.is_full:
                self._forget()
            counter, messages = self._counter(operation, group, peer_rank)
            # By the addresses of its instructions, as long as its code is held.
            addresses = tuple([id(code) + offset for code, offset in zip(raw[::2], raw[1::2], strict=True)])
            stack, _ = self._stacks.get(addresses, (0, None))
            if not stack:
                stack = next(self._next_number)
                self._stacks[addresses] = stack, raw
                self._describe("stack", stack, self._symbols.stack(raw))
            entry = self._describe(
                *("site", next(self._next_number), group_name, operation),
                *(tuple(tuple(tensor.shape) for tensor in tensors) for tensors in (inputs, outputs)),
                tuple(dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in inputs or outputs)),
                None if peer_rank is None else group.ranks[peer_rank],
                stack,
            )
            site = raw, entry[1], counter, messages
            # A new list: another thread may be going through the old one.
            self._sites[key] = [*self._sites.get(key, ()), site]
            self._num_sites += 1
            return site

    def _counter(
        self, operation: str, group: ProcessGroup, peer_rank: int | None
    ) -> tuple[int, itertools.count[int] | None]:
        name = group.group_name
        if not self._ring.has_counters:
            self._forget()
        if name not in self._groups:
            self._groups[name] = ("group", name, group.ranks, group.axis_name, self._ring.counter())
            self._ring.describe(*self._groups[name])
        if operation not in ("send", "recv"):
            return self._groups[name][4], None
        if peer_rank is None:
            return layout.COUNTERS_AT // 8, None
        channel = self._channels.get((name, operation, peer_rank))
        if channel is None:
            entry = ("channel", name, operation, group.ranks[peer_rank], self._ring.counter())
            channel = self._channels[name, operation, peer_rank] = (itertools.count(1), entry)
            self._ring.describe(*entry)
        return channel[1][4], channel[0]

    def _forget(self) -> None:
        """Keep the descriptions that the ring's records need; what is called again is learnt again."""
        slots = memoryview(self._memory)[self._slots_at : self._slots_at + _SLOT_BYTES * self._num_records]
        numbers = {number for slot in layout.SLOT.iter_unpack(slots) for number in slot[1:3]}
        # What has been described just now may be on its way into a slot.
        newest = next(self._next_number)
        numbers.update(range(newest - _NUM_UNDER_WAY, newest))
        described = self._described
        sites = [entry for number, entry in described.items() if number in numbers and entry[0] == "site"]
        numbers.update(entry[-1] for entry in sites)
        self._described = {number: entry for number, entry in described.items() if number in numbers}
        if self._world is not None:
            self._forget_groups({*(entry[2] for entry in sites), *(group.group_name for group in self._world.groups)})
        channels = (entry for _, entry in self._channels.values())
        self._ring.replace([*self._lasting, *self._groups.values(), *channels, *self._described.values()])
        self._sites, self._num_sites, self._stacks, self._labels = {}, 0, {}, {}
        self._symbols = Symbols()

    def _forget_groups(self, named: AbstractSet[str]) -> None:
        """But for those that are `named`: the others have been destroyed, and no record is of them."""
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
