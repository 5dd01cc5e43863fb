"""The recorder: keeps the last operations of this process in a ring.

It runs at every call of every layer, so the hot path takes no lock, makes no text and holds no tensor. It looks up the
key of a call's arguments and callers, and writes a few numbers into the ring. Only new keys are described.
"""

from __future__ import annotations

import itertools
import logging
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from disttrain._python.garbage import uncollected
from disttrain.errors import FlightDumpError
from disttrain.flight_recorder.dumps.words import rank_name
from disttrain.flight_recorder.record.device.marks import Cuda, DeviceMarks
from disttrain.flight_recorder.record.process.callers import EIGHT, Walker, are_callers, walker
from disttrain.flight_recorder.record.process.symbols import PACKAGE
from disttrain.flight_recorder.record.ring import layout
from disttrain.flight_recorder.record.ring.descriptions import Descriptions, Site
from disttrain.flight_recorder.record.ring.header import ring_header
from disttrain.flight_recorder.record.ring.ring import Ring
from disttrain.flight_recorder.record.shapes import several, shapes_of

if TYPE_CHECKING:
    from types import FrameType

    from disttrain.errors import DisttrainError
    from disttrain.flight_recorder.dumps.dump import Dump
    from disttrain.flight_recorder.record.listing import IsOfGraph, Listing, Part, Progress
    from disttrain.process_group import World
    from disttrain.process_group.interfaces import GroupLike
    from disttrain.process_group.watching.observer import How

_log = logging.getLogger(__name__)

_JOB_KEY: Final = "flight_recorder/job"

_getframe: Final = sys._getframe
_now_ns: Final = time.monotonic_ns
_pack_into: Final = layout.BEGUN_SLOT.pack_into
_SLOT_WORDS: Final = layout.SLOT_WORDS
_WAITS_WORD: Final = layout.WAITS_WORD
_ENDED_WORD: Final = layout.ENDED_WORD
_SEQUENCE_WORD: Final = layout.SEQUENCE_WORD

_LISTED: Final = (-1, 0)
"""In place of a record: no slot has this number."""

_DEPTH: Final = 3
"""The number of frames from `begin` to the caller of the collective: `issue` and the collective are ours. Only frames
that are requested cost time."""


class FlightRecorder:
    """Keeps the last `num_records` operations of this process, each with its innermost `num_frames` Python frames.

    Of calls that disttrain makes itself, for a sharded module say, it keeps three times as many: the user's are deeper.
    With `marks_device`, dumps also tell when a GPU came to each operation that it carries out, and left it.
    `attach` it to a world, then `dump` at any time, from any thread.
    """

    def __init__(self, num_records: int = 2000, num_frames: int = 8, *, marks_device: bool = True) -> None:
        self._num_records = num_records
        self._num_frames, self._num_inside = num_frames, 3 * num_frames
        self._marks_device = marks_device
        self._walkers: dict[str, Walker] = {}
        self._world: World | None = None
        self._marks: DeviceMarks | None = None
        self.current_listing: Listing | None = None
        self._next_graph = itertools.count(1).__next__
        self._header: dict[str, Any] = {}
        self._closing: list[Callable[[], None]] = []
        self._last: Site
        """The site of the previous call, of any thread; if threads alternate, the shortcut finds less."""
        self._use(Ring(num_records))

    @property
    def ring(self) -> Ring:
        """The ring that holds the records."""
        return self._ring

    @property
    def world(self) -> World:
        """The world whose operations are recorded. Raises FlightDumpError before `attach`."""
        if self._world is None:
            raise FlightDumpError("dump", "the recorder does not know its rank yet.", "Call attach(world) first.")
        return self._world

    @property
    def job(self) -> str:
        """The name that the ranks of this world have drawn together; files of theirs have it in their names."""
        return str(self._header["job"])

    @property
    def name(self) -> str:
        """The beginning of this rank's file names: `rank-00003.` and the job's name."""
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
            self._world = self._descriptions.world = world
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
        self._descriptions.keep(*entry)

    def called_at(self, site: int) -> tuple[tuple[Any, ...], str] | None:
        """The ring's entry of the group, and the operation, of a call site by its number; None when it is forgotten."""
        return self._descriptions.called_at(site)

    def begin(
        self,
        operation: str,
        group: GroupLike,
        sequence: int,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        peer_rank: int | None,
        how: How = None,
    ) -> tuple[int, int]:
        """Record a call that is about to be handed to its transport. Returns: its number, and the word of its slot.

        While a step is recorded as a graph, what is called for it is listed, and has neither.
        """
        try:
            first = _getframe(_DEPTH)
        except ValueError:
            first = _getframe(1)
        shape: Any
        dtype: Any
        brought: Any
        tensors = inputs or outputs
        if len(tensors) == 1:
            tensor = tensors[0]
            shape, dtype = tensor.shape, tensor.dtype
            if outputs is inputs or not outputs:
                brought = outputs is inputs
            elif not inputs:
                brought = None
            else:
                brought = outputs[0].shape if len(outputs) == 1 else shapes_of(outputs)
        else:
            shape, dtype, brought = several(inputs, outputs)
        world = group.world
        action, module, label = self._label
        # Before the site: to describe a label may make what is known of sites be forgotten.
        if world.action is not action or world.module is not module:
            label = self._new_label(world.action, world.module)
        last = self._last
        site = last.following
        is_next = False
        # Training is a loop: comparing with the site that came next the last time takes less than a search among all.
        if (
            first.f_code is site.code
            and first.f_lasti == site.offset
            and shape == site.shape
            and (second := first.f_back) is not None
            and (third := second.f_back) is not None
            and (fourth := third.f_back) is not None
            and (fifth := fourth.f_back) is not None
            and (sixth := fifth.f_back) is not None
            and (seventh := sixth.f_back) is not None
            and (eighth := seventh.f_back) is not None
        ):
            # One by one: in a loop, in lists that grow, they take half as long again.
            # fmt: off
            is_next = site.key == (
                operation, group.group_name, peer_rank, how, dtype, brought,
                second.f_lasti, third.f_lasti, fourth.f_lasti, fifth.f_lasti,
                sixth.f_lasti, seventh.f_lasti, eighth.f_lasti,
                second.f_code, third.f_code, fourth.f_code, fifth.f_code,
                sixth.f_code, seventh.f_code, eighth.f_code,
            )
            # fmt: on
        if not is_next:
            arguments = operation, group.group_name, peer_rank, how, shape, dtype, brought
            site = last.following = self._site_of(site, first, arguments, group, inputs, outputs)
        self._last = site
        if not sequence and (messages := site.messages) is not None:
            sequence = next(messages)
        if (listing := self.current_listing) is not None and listing.takes(inputs or outputs, group):
            listing.add(site, label, group, operation, peer_rank, sequence)
            return _LISTED
        # One call for a number: threads may come here together.
        number = self._next_number()
        # Computed, since a list of offsets would take up room in the processor's cache.
        word = self._first_word + number % self._num_records * _SLOT_WORDS
        self._words[site.counter] = sequence
        now_ns = _now_ns()
        if self._marks is not None:
            self._marks.came(number, now_ns, inputs or outputs, group)
        _pack_into(self._memory, 8 * word, number, site.number, label, sequence, now_ns, number)
        return number, word

    def waits(self, record: tuple[int, int]) -> None:
        """Record that the host begins to wait for the call of `record`: not at once, as for most, but later."""
        words = self._words
        number, word = record
        if words[word] == number:
            words[word + _WAITS_WORD] = _now_ns()
            if self._marks is not None:
                self._marks.waits(number)

    def end(self, record: tuple[int, int], error: DisttrainError | None) -> None:
        """Record that the host has waited for the call of `record`, unless another has got its slot."""
        words = self._words
        number, word = record
        if words[word] == number:
            if error is not None:
                self._descriptions.failed(number, error)
                words[word + _SEQUENCE_WORD] |= layout.FAILED_BIT
            elif self._marks is not None:
                self._marks.left(number)
            words[word + _ENDED_WORD] = _now_ns()

    def listing(self, progress: Progress | None = None, is_of_graph: IsOfGraph | None = None) -> Listing:
        """A context within which a step is recorded as a graph: its calls are listed, to be told at each replay.

        Args: progress  how far the device is within the graph; default: on GPUs, of a job with other ranks, marks in
              the graph;  is_of_graph  whether a call of these tensors in this group is within the graph.
        """
        # Here: most jobs record no step.
        from disttrain.flight_recorder.record.listing import Listing, is_captured

        if progress is None and self._marks is not None and self.world.world_size > 1:
            from disttrain.flight_recorder.record.device.graph_progress import graph_progress  # as above

            progress = graph_progress(self.world.device)
        return Listing(self, self._descriptions, self._next_graph(), progress, is_of_graph or is_captured)

    @property
    def listings(self) -> list[Listing]:
        """The recorded steps that may be replayed."""
        return self._descriptions.listings

    def begin_part(self, part: Part, replay: int, *, is_marked: bool) -> tuple[int, int]:
        """Record that a part of a recorded step is about to be replayed, as `begin` does. `is_marked`: on the device
        too."""
        number = self._next_number()
        word = self._first_word + number % self._num_records * _SLOT_WORDS
        self._words[part.counter] = part.before + part.num_calls
        if is_marked and self._marks is not None:
            self._marks.replay_begins(number)
        _pack_into(self._memory, 8 * word, number, part.number, replay, part.before, _now_ns(), number)
        return number, word

    def content(self) -> bytes:
        """The ring at this moment."""
        return self._descriptions.content()

    def snapshot(self, reason: str, error: BaseException | None = None, *, device_is_busy: bool | None = None) -> Dump:
        """The records so far, as a dump. Raises FlightDumpError before `attach`."""
        # Here: what reads rings takes longer to load than all of a world's start.
        from disttrain.flight_recorder.dumps.snapshot import take_snapshot

        with uncollected():
            content = self.content()
            marked_ns = {} if self._marks is None else self._marks.read()
            # After that: what has ended by then is not said to have not.
            progress = {each.number: said for each in self.listings if (said := each.progress()) is not None}
            return take_snapshot(self.world, content, marked_ns, progress, reason, error, device_is_busy=device_is_busy)

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
        from disttrain.flight_recorder.dumps.dump import dump_name, write_dump  # as above

        with uncollected():
            dump = self.snapshot(reason, error, device_is_busy=device_is_busy)
            file = Path(path)
            if file.is_dir():
                file /= dump_name(dump)
            write_dump(file, dump)
        return file

    def _use(self, ring: Ring) -> None:
        self._ring = ring
        self._descriptions = Descriptions(ring)
        self._sites = self._descriptions.sites
        self._last = Site([], 0, 0, None)
        self._label: tuple[str, str, int] = ("", "", 0)
        self._memory, self._words = ring.memory, ring.words
        self._first_word = ring.first_word
        self._next_number = itertools.count().__next__

    def _site_of(
        self,
        expected: Site,
        first: FrameType,
        arguments: tuple[Any, ...],
        group: GroupLike,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> Site:
        """The site of a call from frame `first` on that asks for so much, among all; learnt where it is new. The one
        `expected` is tried first."""
        if expected.arguments == arguments and are_callers(expected.callers, self._num_inside, first):
            return expected
        file = first.f_code.co_filename
        codes, offsets = callers = (self._walkers.get(file) or self._walker_of_file(file))(first)
        key = *arguments, offsets
        for site in self._sites.get(key, ()):
            if site.codes == codes:
                return site
        site = self._descriptions.site(key, group, inputs, outputs, callers)
        if file.startswith(PACKAGE):
            site.arguments, site.callers = arguments, [*zip(codes, offsets, strict=True)]
        elif len(codes) == EIGHT == self._num_frames:
            operation, group_name, peer_rank, how, site.shape, dtype, brought = arguments
            site.key = operation, group_name, peer_rank, how, dtype, brought, *offsets[1:], *codes[1:]
            site.offset, site.code = offsets[0], codes[0]
        return site

    def _walker_of_file(self, file: str) -> Walker:
        """The function that walks over the callers of `file`; looked up once for each."""
        num_frames = self._num_inside if file.startswith(PACKAGE) else self._num_frames
        file_walker = self._walkers[file] = walker(num_frames)
        return file_walker

    def _new_label(self, action: str, module: str) -> int:
        label = self._descriptions.label(action, module)
        self._label = (action, module, label)
        return label
