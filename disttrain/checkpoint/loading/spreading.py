"""Reads for other ranks: a rank reads and verifies its share of the common bytes, and broadcasts it to the others.

A message is the fetched bytes and one byte that says whether the fetch succeeded. A rank that has failed still takes
part in all exchanges, so that nobody waits for it; the others hear of its error at the next agreement.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import torch

from disttrain.checkpoint.loading.reader import NUM_THREADS, Reader, devices_caught_up
from disttrain.checkpoint.loading.scattering import Targets, scatter
from disttrain.checkpoint.loading.sharing import SharedFetch
from disttrain.checkpoint.storage.local_file import PAGE_BYTES, aligned_memory
from disttrain.checkpoint.storage.open_files import OpenFiles
from disttrain.process_group import ProcessGroup, World
from disttrain.process_group.calls.collectives import broadcast
from disttrain.process_group.work import Work

_NUM_AHEAD = 4
"""The number of fetches that a rank reads before their turn comes."""

_NUM_IN_FLIGHT = 4
"""The number of broadcasts that are in flight."""

_GOOD, _FAILED = 0, 1


class Spreading:
    """Fills this rank's targets with what ranks read for each other: its groups and memory, whose creation may fail.

    So it is made before anybody depends on it; all ranks go by one plan.
    """

    def __init__(self, reader: Reader, plan: Sequence[SharedFetch], targets: Targets, world: World) -> None:
        self._reader, self._targets, self._rank = reader, targets, world.rank
        self._mine = [shared for shared in plan if world.rank in shared.holders]
        self._groups = {holders: world.shared_group(holders) for holders in {shared.holders for shared in self._mine}}
        largest_bytes = max((shared.fetch.num_bytes for shared in self._mine), default=0)
        self._messages = [_Message(largest_bytes) for _ in range(min(_NUM_AHEAD + _NUM_IN_FLIGHT, len(self._mine)))]

    def run(self) -> None:
        """Exchange. Raises, at the end, the first error of this rank's own. Collective: the holders of each fetch."""
        files = OpenFiles(
            self._reader.opened, [shared.fetch.file for shared in self._mine if shared.reader == self._rank]
        )
        with files, ThreadPoolExecutor(NUM_THREADS, "disttrain-read") as pool, ExitStack() as stack:
            exchange = _Exchange(self._reader, files, pool, self._targets, self._rank, self._mine, self._messages)
            exchange.attempt(lambda: stack.enter_context(devices_caught_up(self._targets)))
            for shared in self._mine:
                exchange.take_part(shared, self._groups[shared.holders])
            exchange.finish()
            if exchange.errors:
                raise exchange.errors[0]


class _Message:
    """Memory for a fetch, which lies in its page as in the file's, and for how that went."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = aligned_memory(num_bytes + PAGE_BYTES + 1)

    def hold(self, shared: SharedFetch) -> None:
        """Be for that fetch, from now on."""
        first, num_bytes = shared.fetch.start % PAGE_BYTES, shared.fetch.num_bytes
        self.shared = shared
        self.data = self._memory[first : first + num_bytes]
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8, offset=first, count=num_bytes + 1)


class _Exchange:
    """Reads and receives in the order of the plan: fetches are read ahead, and received bytes are scattered.

    Once anything has failed here, its messages say so, and the exchange goes on, since others take part in it.
    """

    def __init__(
        self,
        reader: Reader,
        files: OpenFiles,
        pool: ThreadPoolExecutor,
        targets: Targets,
        rank: int,
        fetches: Sequence[SharedFetch],
        messages: Sequence[_Message],
    ) -> None:
        self.errors: list[Exception] = []
        self._reader, self._files, self._pool = reader, files, pool
        self._targets, self._rank = targets, rank
        self._to_read = deque(shared for shared in fetches if shared.reader == rank)
        self._ahead: deque[Future[_Message]] = deque()
        self._in_flight: deque[tuple[_Message, Work]] = deque()
        self._free = list(messages)

    def attempt(self, act: Callable[[], object]) -> bool:
        """Do it, unless anything has failed. Returns whether it was done."""
        if self.errors:
            return False
        try:
            act()
        except Exception as error:  # noqa: BLE001  raised when all have been served
            self.errors.append(error)
            return False
        return True

    def take_part(self, shared: SharedFetch, group: ProcessGroup) -> None:
        """Broadcast what this rank has read, or what another has."""
        while self._to_read and len(self._ahead) < _NUM_AHEAD:
            self._read_ahead(self._message(self._to_read.popleft()))
        message = self._ahead.popleft().result() if shared.reader == self._rank else self._message(shared)
        work = broadcast(message.tensor, shared.reader, group, async_op=True)
        assert work is not None
        self._in_flight.append((message, work))
        if len(self._in_flight) >= _NUM_IN_FLIGHT:
            self._collect()

    def finish(self) -> None:
        while self._in_flight:
            self._collect()

    def _message(self, shared: SharedFetch) -> _Message:
        message = self._free.pop()
        message.hold(shared)
        return message

    def _read_ahead(self, message: _Message) -> None:
        if not self.attempt(lambda: self._ahead.append(self._pool.submit(self._read, message))):
            failed: Future[_Message] = Future()
            failed.set_result(self._read(message))
            self._ahead.append(failed)

    def _read(self, message: _Message) -> _Message:
        is_good = self.attempt(lambda: self._reader.bring(self._files, message.shared.fetch, message.data))
        message.tensor[-1] = _GOOD if is_good else _FAILED
        return message

    def _collect(self) -> None:
        """Wait for the oldest broadcast, and use what it has brought."""
        message, work = self._in_flight.popleft()
        work.wait()
        if message.tensor[-1] == _GOOD:
            self.attempt(lambda: scatter(message.shared.fetch, message.data, self._targets))
        self._free.append(message)
