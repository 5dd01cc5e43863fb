"""One session with a server, shared by many threads, without a thread of its own.

The first thread that waits for a reply leads: it reads from the socket and hands the others their replies. Once it has
its own it passes the lead to a thread that still waits (leader/followers: Schmidt et al., Pattern-Oriented Software
Architecture 2, 2000). So a single thread never has to switch to another one.

When the connection breaks, the leader makes another one and repeats, under their old ids, all requests without a reply.

The invariant: while a thread is parked, either some thread leads or a parked thread has been woken to lead.
"""

from __future__ import annotations

import itertools
import socket
import struct
import threading
from time import monotonic
from typing import Any, Final, Protocol

from disttrain.errors import StoreConnectionError, StoreError, StoreLimitError, StoreTimeoutError
from disttrain.store.connection.dial import Dialer
from disttrain.store.connection.forks import FORKS
from disttrain.store.protocol.handshake import to_address
from disttrain.store.protocol.limits import SETTING_OF
from disttrain.store.protocol.wire import NEWS, NOT_A_REQUEST, Answer, Encoder, Op, WireError

SLACK_S: Final = 2.0
"""The time after a request's timeout in which the server may still say so itself."""

_CANCEL_S: Final = 1.0
_READ_BYTES: Final = (448,)
"""Room for most answers, and with its header still one of Python's own small blocks: malloc would take longer."""

_LARGE_READ_BYTES: Final = (16 << 10,)
_LARGE_ANSWERS: Final = frozenset((Op.MULTI_GET, Op.LIST_KEYS))
_MOST_READ_BYTES: Final = 1 << 20
_TIMER_STEP_S: Final = 1.0


_CLOSED: Final = "it was closed"
_RELEASED: Final[Answer] = (NOT_A_REQUEST, None)
"""In place of the answer to a request whose owner was released."""


class Owner(Protocol):
    """Whose a request is, where several share a channel: `is_closed` before it is released."""

    is_closed: bool


class _Call:
    """A request under way; once `was_sent`, on whatever link, it is for whoever makes the next one to send it again.

    `wake` is a held lock once its thread is parked. What most calls never change is kept by the class.
    """

    request: tuple[Any, ...]
    owner: Owner | None = None
    was_sent = False
    answer: Answer | None = None
    wake: threading.Lock | None = None


class Channel:
    """Requests and answers over the links that `dialer` makes."""

    def __init__(self, dialer: Dialer, timeout_s: float) -> None:
        self.dialer = dialer
        self._encode = Encoder().encode
        self._socket, self._decoder, self._frame_bytes = dialer.dial(timeout_s)
        self._num_forks = FORKS.num_forks
        self._ids = itertools.count()
        # Guards the next three, and what is sent.
        self._send_lock = threading.Lock()
        self._is_up = True
        # What the kernel's timers are set to; whoever sends, or leads, may change its own.
        self._send_timer_s = 0.0
        self._read_timer_s = 0.0
        # Read and not yet looked at; belongs to the leader.
        self._inbox: list[bytes] = []
        # Guards everything below, and which socket is ours.
        self._mutex = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._parked: dict[_Call, None] = {}
        self._leader: _Call | None = None
        self._broken = ""

    @property
    def where(self) -> str:
        """The server's address, for messages."""
        return self.dialer.where

    @property
    def is_broken(self) -> bool:
        """True where it is of no further use to this process."""
        return bool(self._broken) or self._num_forks != FORKS.num_forks

    def request(self, op: Op, arguments: tuple[Any, ...], wait_s: float, owner: Owner | None = None) -> Answer:
        """Ask, and wait for the answer: `wait_s` for the server to give it, then SLACK_S for any sign of life.

        Raises StoreTimeoutError when no answer came, StoreConnectionError when the connection is broken and not to be
        had back, or `owner` closed, StoreLimitError for a request over the server's frame limit. Any thread may call.
        """
        if self._num_forks != FORKS.num_forks:
            raise self._forked(op)
        request_id = next(self._ids)
        request = (request_id, op, *arguments)
        frame = self._encode(request)
        if len(frame) > self._frame_bytes:
            raise self._too_large(op, len(frame))
        timeout_s = wait_s + SLACK_S
        deadline_s = monotonic() + timeout_s
        call = _Call()
        call.request = request
        if owner is not None:
            call.owner = owner
        try:
            with self._mutex:
                if self._broken or (owner is not None and owner.is_closed):
                    raise self._gone(op)
                self._calls[request_id] = call
                if self._leader is None:
                    self._leader = call
            self._send(op, call, frame, timeout_s)
            wait = self._lead if self._leader is call else self._await
            answer = wait(op, call, deadline_s)
            if answer is _RELEASED:
                raise self._gone(op)
            return answer
        except BaseException:
            self._abandon(request_id, call)
            raise

    def close(self, reason: str = _CLOSED) -> None:
        """Fail every request under way and all that follow. Idempotent."""
        if self._num_forks != FORKS.num_forks:
            # The parent still uses the connection: let go of our descriptor of it, no more.
            self._socket.close()
            return
        with self._mutex:
            if self._broken:
                return
            self._broken = reason
            self.dialer.give_up()
            if self._send_lock.acquire(blocking=False):
                self._tell((next(self._ids), Op.LEAVE))
                self._send_lock.release()
            self._shut_down()
            for call in self._parked:
                assert call.wake is not None
                call.wake.release()
            self._parked.clear()
            self._close_unused_socket()

    def release(self, owner: Owner) -> None:
        """Fail the requests of `owner`, which has closed; the others go on."""
        if self._num_forks != FORKS.num_forks:
            return
        with self._mutex:
            request_ids = [request_id for request_id, call in self._calls.items() if call.owner is owner]
            for request_id in request_ids:
                call = self._calls.pop(request_id)
                call.answer = _RELEASED
                if self._parked.pop(call, call) is None:
                    assert call.wake is not None
                    call.wake.release()
        # The server's word that it has forgotten them is what a thread that leads reads next; then another one leads.
        with self._send_lock:
            for request_id in request_ids:
                self._tell((next(self._ids), Op.CANCEL, request_id))

    def break_link(self) -> None:
        """Let whoever waits for an answer ask for it again, on another link."""
        with self._mutex:
            self._shut_down()

    def _send(self, op: Op, call: _Call, frame: bytes, timeout_s: float) -> None:
        """Send `frame`, unless there is no link: then whoever leads makes one, and sends what has not been answered."""
        # Nearly always it is free, and asking for a timeout takes as long as all the rest.
        if not self._send_lock.acquire(False) and not self._send_lock.acquire(timeout=timeout_s):
            raise self._frozen(op, timeout_s)
        try:
            if self._is_up and not call.was_sent:
                call.was_sent = True
                if timeout_s != self._send_timer_s:
                    self._set_timer(socket.SO_SNDTIMEO, timeout_s)
                    self._send_timer_s = timeout_s
                self._socket.sendall(frame)
        except BaseException as error:
            # Perhaps half of the frame has gone: nothing can follow it on this link.
            self._is_up = False
            self._shut_down()
            if isinstance(error, BlockingIOError):
                raise self._frozen(op, timeout_s) from None
            if not isinstance(error, OSError):
                raise
        finally:
            self._send_lock.release()

    def _await(self, op: Op, call: _Call, deadline_s: float) -> Answer:
        """Wait until somebody has read our answer, or we are to lead."""
        while True:
            with self._mutex:
                if call.answer is not None:
                    return call.answer
                if self._broken:
                    raise self._gone(op)
                wake = None if self._leader is None else self._park(call)
                self._leader = self._leader or call
            if wake is None:
                return self._lead(op, call, deadline_s)
            if not wake.acquire(timeout=max(0.0, deadline_s - monotonic())):
                raise self._frozen(op, SLACK_S)

    def _park(self, call: _Call) -> threading.Lock:
        if call.wake is None:
            call.wake = threading.Lock()
            call.wake.acquire()
        self._parked[call] = None
        return call.wake

    def _lead(self, op: Op, own_call: _Call, deadline_s: float) -> Answer:
        """Read until our own answer has come."""
        inbox = self._inbox
        usual_size = size = _LARGE_READ_BYTES if op in _LARGE_ANSWERS else _READ_BYTES
        while own_call.answer is None:
            if not inbox:
                remaining_s = deadline_s - monotonic()
                if not remaining_s <= self._read_timer_s <= remaining_s + _TIMER_STEP_S:
                    self._set_read_timer(op, remaining_s)
                try:
                    # One call into C from the socket to the inbox: a signal handler that raises finds no gap in which
                    # the bytes were read and nobody has them; the next leader goes on with them.
                    inbox.extend(map(self._socket.recv, size))
                except BlockingIOError:
                    continue
                except OSError:
                    inbox.append(b"")
            if not inbox[-1]:
                self._reconnect(op, deadline_s)
                continue
            try:
                messages = self._decoder.feed(inbox.pop())
                size = usual_size if messages else (min(self._decoder.num_missing_bytes, _MOST_READ_BYTES),)
                with self._mutex:
                    for request_id, status, value in messages:
                        call = self._calls.pop(request_id, None)
                        if call is own_call:
                            own_call.answer = (status, value)
                            self._leader = None
                        else:
                            self._hand_out(request_id, call, (status, value))
                    if self._leader is None and (self._parked or self._broken):
                        self._step_down(own_call)
            except BaseException as error:
                # The decoder and the calls may not fit together any more; what has no answer is asked again.
                self._shut_down()
                if not isinstance(error, (WireError, ValueError, TypeError)):
                    raise
                self.close(error.problem.rstrip(".") if isinstance(error, WireError) else "a reply made no sense")
                raise self._gone(op) from None
        return own_call.answer

    def _set_read_timer(self, op: Op, remaining_s: float) -> None:
        if remaining_s <= 0:
            raise self._frozen(op, SLACK_S)
        # A little late, so that requests with the same timeout that follow need not set it again.
        self._read_timer_s = remaining_s + _TIMER_STEP_S / 2
        self._set_timer(socket.SO_RCVTIMEO, self._read_timer_s)

    def _hand_out(self, request_id: object, call: _Call | None, answer: Answer) -> None:
        """Give another thread's call its answer."""
        if call is not None:
            call.answer = answer
            if self._parked.pop(call, call) is None:
                assert call.wake is not None
                call.wake.release()
        elif request_id == NOT_A_REQUEST:
            raise WireError("store", f"the server hung up: {answer[1]}.")
        elif request_id == NEWS:
            self.dialer.standby = to_address(answer[1])

    def _reconnect(self, op: Op, deadline_s: float) -> None:
        """The link is gone: make another one, and send on it what has no answer yet."""
        if not self._send_lock.acquire(timeout=max(0.0, deadline_s - monotonic())):
            raise self._frozen(op, SLACK_S)
        try:
            self._is_up = False
            self._shut_down()
            try:
                link = None if self._broken else self.dialer.redial(deadline_s)
            except StoreError as error:
                self.close(f"{error.problem.rstrip('.')}")
                raise self._gone(op) from None
            with self._mutex:
                if self._broken or link is None:
                    if link is not None:
                        link.socket.close()
                    raise self._gone(op) if self._broken else self._not_back(op)
                self._socket.close()
                self._socket, self._decoder, self._frame_bytes = link
                self._inbox.clear()
                self._send_timer_s = self._read_timer_s = 0.0
                self._is_up = True
                calls = list(self._calls.values())
            self._set_timer(socket.SO_SNDTIMEO, max(SLACK_S, deadline_s - monotonic()))
            for call in calls:
                request_id, requested, *arguments = call.request
                op_or_repeated = -requested if call.was_sent else requested
                call.was_sent = True
                self._socket.sendall(self._encode((request_id, op_or_repeated, *arguments)))
        except OSError as error:
            if isinstance(error, StoreError):
                raise
            # This link did not hold either; whoever reads next finds out.
            self._is_up = False
            self._shut_down()
        finally:
            self._send_lock.release()

    def _abandon(self, request_id: int, call: _Call) -> None:
        """The caller waits no longer: the server need not either, and another may have to lead."""
        with self._mutex:
            is_open = self._calls.pop(request_id, None) is not None and call.was_sent and not self._broken
            self._parked.pop(call, None)
            self._step_down(call)
        if is_open and self._send_lock.acquire(timeout=_CANCEL_S):
            try:
                self._tell((next(self._ids), Op.CANCEL, request_id))
            finally:
                self._send_lock.release()

    def _tell(self, message: tuple[Any, ...]) -> None:
        """Send what needs no answer, if there is a link with room for it."""
        frame = self._encode(message)
        try:
            if self._is_up and self._socket.send(frame, socket.MSG_DONTWAIT) < len(frame):
                self._shut_down()
        except OSError:
            # The link is stuck or broken: who waits for nothing need not know.
            pass

    def _step_down(self, call: _Call) -> None:
        """`call` is over: if it led, or was woken to lead, another takes its place."""
        if self._leader is call:
            self._leader = None
        if self._leader is None and self._parked:
            follower, _ = self._parked.popitem()
            assert follower.wake is not None
            follower.wake.release()
        self._close_unused_socket()

    def _shut_down(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            # The other side was first.
            pass

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
        problem = f"the connection to the store is gone: {self._broken or _CLOSED}."
        return StoreConnectionError(op.name.lower(), problem, "See whether its server is alive.", where=self.where)

    def _not_back(self, op: Op) -> StoreError:
        problem = "the connection to the store is gone, and there was no other within the timeout."
        remedy = "See whether its server is alive, and the network to it."
        # Where there is a standby, one of the two will answer, or both be gone.
        kind = StoreConnectionError if self.dialer.standby is None else StoreTimeoutError
        return kind(op.name.lower(), problem, remedy, where=self.where)

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
