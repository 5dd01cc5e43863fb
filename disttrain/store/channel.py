"""One connection shared by many threads, with no thread of its own.

Whoever waits for an answer reads for all: the first waiting thread leads, reads from the socket, hands the others
their answers, and once it has its own passes the lead to one that still waits (leader/followers: Schmidt et al.,
Pattern-Oriented Software Architecture 2, 2000). A lone thread pays for no switch to another one.

The invariant: while a thread is parked, either somebody leads or a parked thread has been woken to lead.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import threading
import time
from typing import Any, Final

from disttrain.errors import StoreConnectionError, StoreError, StoreLimitError, StoreTimeoutError
from disttrain.store.limits import SETTING_OF
from disttrain.store.wire import Answer, Decoder, Message, Op, WireError, encode

SLACK_S: Final = 2.0
"""How long after a request's timeout the server may still take to say so itself."""

_READ_BYTES: Final = (16 << 10,)
"""Small: the allocator gives large buffers back to the kernel, which costs more than the whole operation."""

_LARGE_READ_BYTES: Final = (1 << 20,)
_TIMER_STEP_S: Final = 1.0


class _Call:
    """A request under way; `wake` is a held lock once its thread is parked."""

    __slots__ = ("answer", "wake")

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self.wake: threading.Lock | None = None


class Channel:
    """Requests and answers over a connected, authenticated, blocking socket, which it owns."""

    def __init__(self, connection: socket.socket, decoder: Decoder, frame_bytes: int, where: str) -> None:
        self.where = where
        self._socket = connection
        self._decoder = decoder
        self._frame_bytes = frame_bytes
        self._pid = os.getpid()
        self._ids = itertools.count()
        self._send_lock = threading.Lock()
        # What the kernel's timers are set to; whoever sends, or leads, may change its own.
        self._send_timer_s = 0.0
        self._read_timer_s = 0.0
        # Read and not yet looked at; belongs to the leader.
        self._inbox: list[bytes] = []
        # Guards everything below.
        self._mutex = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._parked: dict[_Call, None] = {}
        self._leader: _Call | None = None
        self._broken = ""

    def request(self, op: Op, *arguments: Any, wait_s: float) -> Answer:
        """Ask, and wait for the answer: `wait_s` for the server to give it, then SLACK_S for any sign of life.

        Raises StoreTimeoutError when no answer came, StoreConnectionError when the connection is or gets broken,
        StoreLimitError for a request over the server's frame limit. Any thread may call.
        """
        if os.getpid() != self._pid:
            raise self._forked(op)
        request_id = next(self._ids)
        frame = encode((request_id, op, *arguments))
        if len(frame) > self._frame_bytes:
            raise self._too_large(op, len(frame))
        timeout_s = wait_s + SLACK_S
        deadline_s = time.monotonic() + timeout_s
        call = _Call()
        with self._mutex:
            if self._broken:
                raise self._gone(op)
            self._calls[request_id] = call
        try:
            self._send(op, frame, timeout_s)
            return self._await(op, call, deadline_s)
        except BaseException:
            with self._mutex:
                self._calls.pop(request_id, None)
                self._parked.pop(call, None)
                self._step_down(call)
            raise

    def close(self, reason: str = "it was closed") -> None:
        """Fail every request under way and all that follow. Idempotent."""
        if os.getpid() != self._pid:
            # The parent still uses the connection: let go of our descriptor of it, no more.
            self._socket.close()
            return
        with self._mutex:
            if self._broken:
                return
            self._broken = reason
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                # The other side was first.
                pass
            for call in self._parked:
                assert call.wake is not None
                call.wake.release()
            self._parked.clear()
            self._close_unused_socket()

    def _send(self, op: Op, frame: bytes, timeout_s: float) -> None:
        if not self._send_lock.acquire(timeout=timeout_s):
            raise self._frozen(op, timeout_s)
        try:
            if not timeout_s <= self._send_timer_s <= timeout_s + _TIMER_STEP_S:
                self._set_timer(socket.SO_SNDTIMEO, timeout_s)
                self._send_timer_s = timeout_s
            self._socket.sendall(frame)
        except BaseException as error:
            # Perhaps half of the frame has gone: nothing can follow it.
            if isinstance(error, BlockingIOError):
                self.close("the server stopped reading")
                raise self._frozen(op, timeout_s) from None
            self.close(str(error) or type(error).__name__)
            if isinstance(error, OSError):
                raise self._gone(op) from None
            raise
        finally:
            self._send_lock.release()

    def _await(self, op: Op, call: _Call, deadline_s: float) -> Answer:
        while True:
            with self._mutex:
                if call.answer is not None:
                    return call.answer
                if self._broken:
                    raise self._gone(op)
                wake = None if self._leader is None else self._park(call)
                self._leader = self._leader or call
            if wake is None:
                self._lead(op, call, deadline_s)
            elif not wake.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
                raise self._frozen(op, SLACK_S)

    def _park(self, call: _Call) -> threading.Lock:
        if call.wake is None:
            call.wake = threading.Lock()
            call.wake.acquire()
        self._parked[call] = None
        return call.wake

    def _lead(self, op: Op, own: _Call, deadline_s: float) -> None:
        """Read until our own answer has come."""
        while own.answer is None:
            if not self._inbox:
                self._read(op, deadline_s)
            if self._inbox:
                self._hand_out(op, own)
        with self._mutex:
            self._step_down(own)

    def _read(self, op: Op, deadline_s: float) -> None:
        """Put what comes next into the inbox; nothing when the kernel's timer fires."""
        remaining_s = deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise self._frozen(op, SLACK_S)
        if not remaining_s <= self._read_timer_s <= remaining_s + _TIMER_STEP_S:
            self._set_timer(socket.SO_RCVTIMEO, remaining_s)
            self._read_timer_s = remaining_s
        try:
            # One call into C from the socket to the inbox: a signal handler that raises finds no gap in which the
            # bytes were read and nobody has them; the next leader goes on with them.
            size = _LARGE_READ_BYTES if self._decoder.num_unread_bytes else _READ_BYTES
            self._inbox.extend(map(self._socket.recv, size))
        except BlockingIOError:
            return
        except OSError as error:
            self.close(str(error))
            raise self._gone(op) from None

    def _hand_out(self, op: Op, own: _Call) -> None:
        """Give everybody the answers that are in the inbox."""
        try:
            messages = self._decoder.feed(b"".join(self._inbox)) if any(self._inbox) else None
            self._inbox.clear()
            with self._mutex:
                for message in messages or ():
                    self._deliver(message, own)
        except WireError as error:
            self.close(error.problem)
            raise self._gone(op) from None
        except BaseException:
            # The decoder and the calls may not fit together any more.
            self.close("a thread was interrupted while it read")
            raise
        if messages is None:
            self.close("the server closed it")
            raise self._gone(op)

    def _deliver(self, message: Message, own: _Call) -> None:
        if len(message) != 3:
            return
        request_id, status, value = message
        call = self._calls.pop(request_id, None) if type(request_id) is int else None
        if call is None:
            # Too late: who asked has given up.
            return
        call.answer = (status, value)
        if call is not own and self._parked.pop(call, call) is None:
            assert call.wake is not None
            call.wake.release()

    def _step_down(self, call: _Call) -> None:
        """`call` is over: if it led, or was woken to lead, another takes its place."""
        if self._leader is call:
            self._leader = None
        if self._leader is None and self._parked:
            follower, _ = self._parked.popitem()
            assert follower.wake is not None
            follower.wake.release()
        self._close_unused_socket()

    def _close_unused_socket(self) -> None:
        # Closing a descriptor that another thread is about to read from could make it read from a stranger's.
        if self._broken and self._leader is None and not self._calls:
            self._socket.close()

    def _set_timer(self, option: int, timeout_s: float) -> None:
        # The kernel's own timers: Python's would cost a poll() for each operation.
        whole_s = int(timeout_s)
        self._socket.setsockopt(
            socket.SOL_SOCKET, option, struct.pack("ll", whole_s, int((timeout_s - whole_s) * 1e6) or 1)
        )

    def _gone(self, op: Op) -> StoreError:
        problem = f"the connection to the store is gone: {self._broken}."
        return StoreConnectionError(op.name.lower(), problem, "See whether its server is alive.", where=self.where)

    def _frozen(self, op: Op, timeout_s: float) -> StoreError:
        problem = f"the store's server has not answered in time, nor {timeout_s:g} s later."
        return StoreTimeoutError(op.name.lower(), problem, "See whether it is alive or overloaded.", where=self.where)

    def _forked(self, op: Op) -> StoreError:
        problem = "this store's connection belongs to the process that we were forked from."
        return StoreConnectionError(op.name.lower(), problem, "Make a new TCPStore in the child.", where=self.where)

    def _too_large(self, op: Op, num_bytes: int) -> StoreError:
        problem = f"the request has {num_bytes} bytes; the server takes {self._frame_bytes}."
        remedy = f"Send less at once, or raise {SETTING_OF['frame_bytes']} where the server is started."
        return StoreLimitError(op.name.lower(), problem, remedy, where=self.where)
