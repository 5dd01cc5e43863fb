"""The recorder: an observer of the one door that keeps the last operations of this process in a ring.

It runs at every call of every layer, so the hot path takes no lock and makes no text: it stores the code objects of the
stack and where each of them was; lines and names are looked up when a dump is made. Tensors are never kept.

Memory is bounded: a record takes less than 2 KiB with all its frames, so 2,000 of them take less than 4 MiB, and
a group or channel some 500 bytes.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from disttrain.errors import FlightDumpError
from disttrain.flight_recorder.dump import Dump, dump_name, write_dump
from disttrain.flight_recorder.python_stacks import (
    LIBRARIES,
    PACKAGE,
    VERSIONS,
    Symbols,
    failure_of,
    thread_stacks,
)
from disttrain.flight_recorder.record import CallSite, ChannelProgress, GroupProgress, Record, State

if TYPE_CHECKING:
    from disttrain.errors import DisttrainError
    from disttrain.process_group import Call, World

MAX_ERROR_CHARS: Final = 500
_JOB_KEY: Final = "flight_recorder/job"

_getframe: Final = sys._getframe
_now_ns: Final = time.monotonic_ns

Values = tuple[Any, ...]
Began = tuple[int, int, str, str, tuple[int, ...], int, int | None, Values, Values, Values, list[Any]]
"""Number, time in ns, operation, group name, its ranks, sequence, peer's group rank, shapes of inputs and of outputs,
dtypes, and the stack: code object, offset, code object, offset, ..., innermost first."""
Ended = tuple[int, int, str | None]
"""Number, time in ns, error."""


class FlightRecorder:
    """Keeps the last `num_records` operations of this process, each with its innermost `num_frames` Python frames.

    Of calls that disttrain makes itself, for a sharded module say, it keeps three times as many: the user's are deeper.
    `attach` it to a world, then `dump` at any time, from any thread.
    """

    def __init__(self, num_records: int = 2000, num_frames: int = 8) -> None:
        self._num_records = num_records
        self._num_frames = num_frames
        self._frames_to_keep: dict[str, range] = {}
        self._numbers = itertools.count()
        self._began: list[Began | None] = [None] * num_records
        self._ended: list[Ended | None] = [None] * num_records
        self._open: dict[int, int] = {}
        self._groups: dict[str, Began] = {}
        self._channels: dict[tuple[str, str, int], tuple[tuple[int, ...], int]] = {}
        self._world: World | None = None
        self._job = ""
        self._started_s = 0.0

    def attach(self, world: World) -> None:
        """Record `world`'s operations from now on. Every rank that attaches does so before its first operation."""
        self._world = world
        self._job = world.store.compare_set(_JOB_KEY, "", uuid.uuid4().hex[:8]).decode()
        self._started_s = time.time()
        world.add_observer(self)

    def detach(self) -> None:
        """Record no more; what has been recorded can still be dumped."""
        if self._world is not None:
            self._world.remove_observer(self)

    def enqueued(self, call: Call) -> None:
        number = next(self._numbers)
        group = call.group
        name, ranks, sequence, peer_rank = group.group_name, group.ranks, call.sequence, call.peer_rank
        if not sequence:
            sequence = self._count_message(name, ranks, call.operation, peer_rank)
        stack: list[Any] = []
        try:
            # This, `Call.enqueued`, `issue` and the collective are ours; only a frame that is asked for costs.
            frame = _getframe(4)
        except ValueError:
            frame = _getframe(2)
        file = frame.f_code.co_filename
        for _ in self._frames_to_keep.get(file) or self._frames_of_file(file):
            stack += (frame.f_code, frame.f_lasti)
            if (outer := frame.f_back) is None:
                break
            frame = outer
        inputs, outputs = call.inputs, call.outputs
        if len(inputs) == 1 and len(outputs) == 1:
            tensor, output = inputs[0], outputs[0]
            input_shapes: Values = (tensor.shape,)
            output_shapes: Values = input_shapes if output is tensor else (output.shape,)
            dtypes: Values = (tensor.dtype,)
        else:
            input_shapes = tuple([tensor.shape for tensor in inputs])
            output_shapes = tuple([tensor.shape for tensor in outputs])
            dtypes = tuple([tensor.dtype for tensor in inputs or outputs])
        began = (
            number,
            _now_ns(),
            call.operation,
            name,
            ranks,
            sequence,
            peer_rank,
            input_shapes,
            output_shapes,
            dtypes,
            stack,
        )
        self._began[number % self._num_records] = began
        if call.sequence:
            self._groups[name] = began
        # By its address: holding the call itself would hold its tensors. A call that is dropped without having been
        # waited for leaves its entry behind, until another takes its address or `_forget_lost` comes by.
        self._open[id(call)] = number
        if len(self._open) > 2 * self._num_records:
            self._forget_lost(number - self._num_records)

    def completed(self, call: Call, error: DisttrainError | None) -> None:
        number = self._open.pop(id(call), None)
        if number is not None:
            text = None if error is None else str(error)[:MAX_ERROR_CHARS]
            self._ended[number % self._num_records] = (number, _now_ns(), text)

    def snapshot(self, reason: str, error: BaseException | None = None) -> Dump:
        """What has been recorded so far, as a value. Raises FlightDumpError before `attach`."""
        world = self._world
        if world is None:
            raise FlightDumpError("dump", "the recorder does not know its rank yet.", "Call attach(world) first.")
        now_s = time.time()
        clock_offset_s = now_s - _now_ns() / 1e9
        return Dump(
            rank=world.rank,
            world_size=world.world_size,
            job=self._job,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_s=self._started_s,
            dumped_s=now_s,
            reason=reason,
            failure=None if error is None else failure_of(error, MAX_ERROR_CHARS),
            versions=VERSIONS,
            package=PACKAGE,
            libraries=LIBRARIES,
            groups=tuple(GroupProgress(name, began[4], began[5]) for name, began in self._groups.copy().items()),
            channels=tuple(
                ChannelProgress(name, operation, ranks[peer], last)
                for (name, operation, peer), (ranks, last) in self._channels.copy().items()
            ),
            threads=thread_stacks(),
            records=self._records(clock_offset_s),
        )

    def dump(self, path: Path | str, reason: str = "asked for", error: BaseException | None = None) -> Path:
        """Write what has been recorded to `path`, whole or not at all, for its owner's eyes only (mode 0600).

        Args:    path  a file, or a folder that is there: the file is then named after job and rank;
                 error  the exception that ends this process, if one does.
        Returns: the file. Raises: OSError when it cannot be written, FlightDumpError before `attach`.
        """
        dump = self.snapshot(reason, error)
        file = Path(path)
        if file.is_dir():
            file /= dump_name(dump)
        write_dump(file, dump)
        return file

    def _records(self, clock_offset_s: float) -> tuple[Record, ...]:
        """The ring, oldest first, while other threads may go on writing into it."""
        symbols = Symbols()
        sites: dict[CallSite, CallSite] = {}
        ended = {entry[0]: entry for entry in self._ended.copy() if entry is not None}
        records = []
        for began in sorted((entry for entry in self._began.copy() if entry is not None), key=_number_of):
            number, began_ns, operation, group_name, ranks, sequence, peer, inputs, outputs, dtypes, stack = began
            site = CallSite(
                group_name=group_name,
                ranks=ranks,
                operation=operation,
                input_shapes=tuple(map(tuple, inputs)),
                output_shapes=tuple(map(tuple, outputs)),
                dtypes=tuple(str(dtype).removeprefix("torch.") for dtype in dtypes),
                peer_rank=None if peer is None else ranks[peer],
                stack=symbols.stack(stack),
            )
            _, ended_ns, error = ended.get(number, (number, None, None))
            records.append(
                Record(
                    site=sites.setdefault(site, site),
                    sequence=sequence,
                    state=State.ENQUEUED if ended_ns is None else State.COMPLETED if error is None else State.FAILED,
                    enqueued_s=began_ns / 1e9 + clock_offset_s,
                    completed_s=None if ended_ns is None else ended_ns / 1e9 + clock_offset_s,
                    error=error,
                )
            )
        return tuple(records)

    def _frames_of_file(self, file: str) -> range:
        """As many frames as to keep for calls from `file`; looked up once for each."""
        frames = range(3 * self._num_frames if file.startswith(PACKAGE) else self._num_frames)
        self._frames_to_keep[file] = frames
        return frames

    def _count_message(self, name: str, ranks: tuple[int, ...], operation: str, peer_rank: int | None) -> int:
        if peer_rank is None:
            return 0
        channel = (name, operation, peer_rank)
        number = self._channels.get(channel, (ranks, 0))[1] + 1
        self._channels[channel] = (ranks, number)
        return number

    def _forget_lost(self, last_number: int) -> None:
        """Forget open calls that have left the ring: those up to `last_number`."""
        for address in [address for address, number in self._open.copy().items() if number <= last_number]:
            self._open.pop(address, None)


def _number_of(began: Began) -> int:
    return began[0]
