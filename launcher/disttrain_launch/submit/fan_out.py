"""Runs one ssh for each host: shows what all print, passes signals on, and ends all when one has failed.

The launchers agree on their end by themselves; what is done here is for those that cannot any more, and for hosts that
were never reached.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence

from disttrain.errors import LaunchError
from disttrain.reports import REQUEUE_EXIT_CODE
from disttrain_launch.output.failure.report import node_that_failed
from disttrain_launch.output.streams.logs import StreamPump
from disttrain_launch.output.streams.streams import Streams
from disttrain_launch.output.terminal.screen import Outlet, PlainVoice
from disttrain_launch.request.job import OPERATION, STDERR, STDOUT
from disttrain_launch.submit.ssh import Order
from disttrain_launch.workers.outcome import Exit
from disttrain_launch.workers.signals import SignalPipe
from disttrain_launch.workers.supervision import STOP_SIGNALS

AGREE_S = 20.0
"""The time that launchers may take to end by themselves once one has ended."""
_UNREACHED = 255
"""ssh's own exit code."""


class FanOut:
    """One job over ssh; `run` is called once.

    Args: num_spare  how many hosts the job can do without;  shutdown_timeout_s  what launchers give their workers after
          a signal.
    """

    def __init__(self, operation: str, orders: Sequence[Order], *, num_spare: int, shutdown_timeout_s: float) -> None:
        self._operation = operation
        self._orders = orders
        self._num_spare = num_spare
        self._shutdown_timeout_s = shutdown_timeout_s
        self._selector = selectors.DefaultSelector()
        self._streams = Streams(self._selector)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._ended: dict[int, Exit] = {}
        """By node rank, in the order of their ends."""
        self._last_lines: dict[int, str] = {}
        self._deadline_s: float | None = None
        self._is_stopping = False
        self._was_signalled = False

    def run(self) -> int:
        """The job's exit code, as `disttrain-launch run` has it. Raises LaunchError when ssh cannot be started."""
        with SignalPipe() as signals:
            signals.interrupts = False
            self._selector.register(signals.fd, selectors.EVENT_READ, signals)
            try:
                for order in self._orders:
                    self._start(order)
                while len(self._ended) < len(self._orders):
                    self._turn()
                return self._conclude()
            finally:
                for process in self._processes.values():
                    process.kill()
                    process.wait()
                self._streams.end_all()
                self._streams.flush()
                self._selector.close()

    def _start(self, order: Order) -> None:
        readers, writers = zip(os.pipe(), os.pipe(), strict=True)
        for stream, fd in zip((STDOUT, STDERR), readers, strict=True):
            os.set_blocking(fd, False)
            self._streams.add_pump(order.node_rank, stream, self._make_pump(order.node_rank, stream, fd))
        try:
            self._processes[order.node_rank] = subprocess.Popen(
                order.command,
                stdin=subprocess.PIPE,
                stdout=writers[0],
                stderr=writers[1],
                bufsize=0,
                start_new_session=True,  # A terminal's Ctrl-C is passed on as an order, not to ssh itself.
            )
        except OSError as error:
            problem = f"{order.command[0]} cannot be run: {error.strerror}."
            raise LaunchError(self._operation, problem, "Install it, or name another by --ssh.") from None
        finally:
            for fd in writers:
                os.close(fd)
        self._tell(order.node_rank, order.told)

    def _make_pump(self, node_rank: int, stream: int, fd: int) -> StreamPump:
        return StreamPump(
            fd,
            voice=PlainVoice(self._streams.screens[stream], b""),  # The launchers have put prefixes before the lines.
            log_file=None,
            shows_bar=node_rank == 0,
            say=self._streams.say,
        )

    def _turn(self) -> None:
        self._streams.balance()
        left_s = None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())
        for key, _ in self._selector.select(left_s):
            match key.data:
                case StreamPump() | Outlet():
                    self._streams.move(key.data)
                case SignalPipe():
                    for number in key.data.read():
                        self._hear(number)
        if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
            self._stop()

    def _hear(self, number: int) -> None:
        if number != signal.SIGCHLD:
            self._was_signalled |= number in STOP_SIGNALS
            self._pass_on(number)
            return
        for node_rank, process in self._processes.items():
            if node_rank not in self._ended and (returncode := process.poll()) is not None:
                self._end(node_rank, Exit(returncode))

    def _end(self, node_rank: int, end: Exit) -> None:
        self._ended[node_rank] = end
        self._last_lines[node_rank] = self._streams.drain(node_rank)
        if self._cannot_go_on and self._deadline_s is None:
            self._deadline_s = time.monotonic() + (0.0 if end.exit_code == _UNREACHED else AGREE_S)

    def _stop(self) -> None:
        """The launchers have had their time: ask them to end, and when that has been done already, leave them."""
        if self._is_stopping:
            for node_rank, process in self._processes.items():
                if node_rank not in self._ended:
                    process.kill()
            self._deadline_s = None
            return
        self._pass_on(signal.SIGTERM)

    def _pass_on(self, number: int) -> None:
        if number in STOP_SIGNALS:
            self._is_stopping = True
            self._deadline_s = time.monotonic() + self._shutdown_timeout_s + AGREE_S
        for node_rank in self._processes.keys() - self._ended.keys():
            self._tell(node_rank, b"%d\n" % number)

    def _tell(self, node_rank: int, line: bytes) -> None:
        pipe = self._processes[node_rank].stdin
        assert pipe is not None, "it was asked for"
        try:
            while line:
                line = line[pipe.write(line) :]
        except BrokenPipeError:
            pass  # It has ended, and will be found so.

    @property
    def _failed(self) -> list[int]:
        """Node ranks, in the order of their ends."""
        return [node_rank for node_rank, end in self._ended.items() if end.exit_code]

    @property
    def _cannot_go_on(self) -> bool:
        """Node 0 has the store, and so the job."""
        return len(self._failed) > self._num_spare or 0 in self._failed

    def _conclude(self) -> int:
        failed = self._failed
        if not self._cannot_go_on:
            return 0
        # Ends come in any order here; where a worker failed, the launchers say on which node.
        said = (node_that_failed(self._last_lines[node_rank]) for node_rank in failed)
        first = next((node_rank for node_rank in said if node_rank in self._ended), failed[0])
        end = self._ended[first]
        if self._was_signalled or end.exit_code == REQUEUE_EXIT_CODE:
            return end.exit_code  # No host is to blame, and the launchers have said why they end.
        reason = "ssh ended with 255: not reached, or lost" if end.exit_code == _UNREACHED else str(end)
        host = self._orders[first].host
        self._streams.say(f"{OPERATION}: host {host} (node {first}) failed first: {reason}\n")
        return end.exit_code
