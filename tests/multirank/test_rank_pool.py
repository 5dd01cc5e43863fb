"""The pool of rank processes gets over what happens to its workers between and during calls."""

from __future__ import annotations

import os
import queue
import re
import signal
import socket
import time
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, ClassVar

import pytest

import disttrain
from disttrain.testing import RankPool, forks, pool
from disttrain.testing.forks import RankParent
from disttrain.testing.pool import RankError
from tests.forkserver.pool import forked_pool


def answer(value: int) -> int:
    return value + disttrain.get_rank()


class Worker:
    """A worker without a process: it says that it is ready, and answers each question with its rank."""

    says: ClassVar[dict[str, str]] = {"kind": "Ready"}

    def __init__(self, rank: int, answers: queue.Queue[tuple[int, Any]], _: object) -> None:
        self.rank, self.answers = rank, answers
        self.has_gone = False
        answers.put((rank, self.says))

    def ask(self, task: dict[str, Any]) -> None:
        assert self.answers.qsize() == task["rank"], "asked before all were ready: their starting takes of its time"
        self.answers.put((self.rank, {"value": self.rank}))

    def log_tail(self) -> str:
        return "no such library"

    def kill(self) -> None:
        pass


def test_nobody_is_asked_before_all_have_started(rank_pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_Rank", Worker)
    with RankPool(beside=rank_pool) as ranks:
        assert ranks.run(3, answer) == [0, 1, 2]
        assert ranks.run(4, answer) == [0, 1, 2, 3]


def test_a_worker_that_cannot_start_says_why(rank_pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_Rank", Worker)
    monkeypatch.setattr(Worker, "says", {"kind": "Gone", "error": "the process of this rank has gone"})
    why = r"(?s)before it was asked.*no such library \[rank 0\]"
    with RankPool(beside=rank_pool) as ranks, pytest.raises(RankError, match=why):
        ranks.run(1, answer)


def test_workers_that_do_not_come_are_not_waited_for(rank_pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_Rank", Worker)
    monkeypatch.setattr(pool, "_START_S", 0.0)
    with RankPool(beside=rank_pool) as ranks:
        monkeypatch.setattr(Worker, "__init__", lambda self, rank, *_: vars(self).update(rank=rank))
        with pytest.raises(RankError, match="not all of 2 workers were there after 0 s"):
            ranks.run(2, answer)


def test_a_worker_that_died_and_an_interrupted_call(rank_pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with RankPool(beside=rank_pool) as ranks:
        assert ranks.run(1, answer, {"value": 1}) == [1]
        kill_worker(ranks)
        assert ranks.run(1, answer, {"value": 2}) == [2]
        with monkeypatch.context() as patch:
            patch.setattr(ranks, "_collect", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ranks.run(1, answer, {"value": 3})
        # The answer to the interrupted call is not taken for this one's.
        assert ranks.run(1, answer, {"value": 4}) == [4]


def crash() -> None:
    if disttrain.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)


def test_a_crash_is_shown_with_its_stack(rank_pool: RankPool) -> None:
    with RankPool(beside=rank_pool) as ranks, pytest.raises(RankError) as raised:
        ranks.run(2, crash)
    assert re.search(r"rank 1 has gone; its log.*Segmentation fault.*in crash", str(raised.value), re.DOTALL)


def test_a_long_list_of_modules_hides_no_stack() -> None:
    with TemporaryFile() as log:
        log.write(b"before\n" * 10_000 + b"in crash\n\nExtension modules: " + b"a.module, " * 2000 + b"(total: 2000)\n")
        assert forks.tail(log).endswith("before\nin crash\n\n\n")


def kill_worker(ranks: RankPool) -> None:
    os.kill(ranks._ranks[0].worker.pid, signal.SIGKILL)
    while not ranks._ranks[0].has_gone:
        time.sleep(0.01)


def kill_parent(ranks: RankPool) -> None:
    (parent,) = ranks._parents.first(1)
    parent._process.kill()
    parent._process.wait()


def test_a_parent_that_died_says_why_and_is_replaced_and_a_worker_that_hangs_ends_without_one(
    fork_servers: list[str],
) -> None:
    with forked_pool(fork_servers) as ranks:
        assert ranks.run(1, answer, {"value": 1}) == [1]
        kill_parent(ranks)
        kill_worker(ranks)
        with pytest.raises(RankError, match="the process that workers are forked from has gone"):
            ranks.run(1, answer, {"value": 2})
        assert ranks.run(1, answer, {"value": 3}) == [3]
        pid = ranks._ranks[0].worker.pid
        os.kill(pid, signal.SIGSTOP)
        kill_parent(ranks)
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.01)  # until init has waited for it


def test_a_parent_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_END_S", 0.1)
    parent = RankParent()
    os.kill(parent._process.pid, signal.SIGSTOP)
    parent._socket.settimeout(0.1)
    with pytest.raises(ConnectionAbortedError, match="has not answered"):
        parent.fork()
    with pytest.raises(ConnectionResetError, match="has gone"):
        parent.fork()
    parent.close()
    assert parent._process.returncode == -signal.SIGKILL


class Unheard:
    """A socket to the parent whose owner is interrupted before the first answer."""

    def __init__(self, socket: socket.socket) -> None:
        self.sendall, self.sendmsg, self._recv = socket.sendall, socket.sendmsg, socket.recv
        self._is_first = True

    def recv(self, size: int) -> bytes:
        if self._is_first:
            self._is_first = False
            raise KeyboardInterrupt
        return self._recv(size)


def own_pid() -> int:
    return os.getpid()


def test_the_answer_to_an_interrupted_fork_is_not_taken_for_the_next_ones(
    rank_pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RankPool(beside=rank_pool) as ranks:
        ranks.run(1, answer, {"value": 1})
        with monkeypatch.context() as patch:
            (parent,) = ranks._parents.first(1)
            patch.setattr(parent, "_socket", Unheard(parent._socket))
            with pytest.raises(KeyboardInterrupt):
                ranks.run(3, answer, {"value": 2})
        assert ranks.run(3, own_pid) == [rank.worker.pid for rank in ranks._ranks]


def threads_before_the_fork() -> int:
    return len(os.listdir(f"/proc/{os.getppid()}/task"))


def test_workers_are_forked_from_a_process_of_one_thread(rank_pool: RankPool) -> None:
    """Locks that another thread held would stay shut in a fork."""
    assert rank_pool.run(1, threads_before_the_fork) == [1]


def hash_of_a_string() -> int:
    return hash("string")


def test_ranks_order_sets_differently(rank_pool: RankPool) -> None:
    """As interpreters of their own do."""
    first, second, third = rank_pool.run(3, hash_of_a_string)
    assert first == third != second


def parent_pid() -> int:
    return os.getppid()


def test_no_process_outlives_its_pool_and_those_beside_it_stay(rank_pool: RankPool) -> None:
    parents = rank_pool.run(2, parent_pid)
    with RankPool(beside=rank_pool) as ranks:
        assert ranks.run(2, parent_pid) == parents
        pids = [rank.worker.pid for rank in ranks._ranks]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert rank_pool.run(2, parent_pid) == parents
