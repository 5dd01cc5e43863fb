"""A pool of rank processes that stays up: torch is imported once, not once per test and rank, so suites are fast."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from disttrain.errors import DisttrainError
from disttrain.store import TCPStore
from disttrain.testing.forks import RankParent, RankParents, tail
from disttrain.testing.frames import read_frame, write_frame

_GRACE_S = 10.0
"""The time that the other ranks may go on after one has failed."""
_START_S = 300.0
"""The time that a worker may take to load torch on a busy machine."""

_NUM_PARENTS = 2
"""Interpreters that workers are forked from. Each has a hash seed of its own: ranks that go by the order of a set of
strings must not agree by chance."""


class RankError(DisttrainError, AssertionError):
    """A function failed, or hung, on some ranks; the message has their tracebacks."""


class _Rank:
    """One worker process, its log, and a thread that turns its answers into queue items."""

    def __init__(self, rank: int, answers: queue.Queue[tuple[int, Any]], parent: RankParent) -> None:
        self.rank = rank
        self.has_gone = False
        self.worker = parent.fork()
        threading.Thread(target=self._listen, args=(answers,), daemon=True).start()

    def ask(self, task: dict[str, Any]) -> None:
        write_frame(self.worker.tasks, task)

    def kill(self) -> None:
        self.worker.kill()

    def log_tail(self) -> str:
        return tail(self.worker.log)

    def _listen(self, answers: queue.Queue[tuple[int, Any]]) -> None:
        try:
            while True:
                answers.put((self.rank, read_frame(self.worker.answers)))
        except (EOFError, ValueError):
            self.has_gone = True
            answers.put((self.rank, {"error": "the process of this rank has gone", "kind": "Gone"}))


class RankPool:
    """Runs functions on ranks that are processes on this machine, over real Gloo or NCCL.

    Each call makes a fresh world of its first `world_size` workers, so that calls cannot disturb each other. Workers
    are started when first needed; a call that hangs or kills one replaces them all. Where ranks are more than GPUs,
    several compute on one.

    Args: beside  a pool whose interpreters the workers are forked from, so that torch is not loaded again. It has to be
          closed after this one.
    """

    def __init__(self, *, beside: RankPool | None = None) -> None:
        self._beside = beside
        self._ranks: list[_Rank] = []
        self._answers: queue.Queue[tuple[int, Any]] = queue.Queue()
        self._jobs = itertools.count()
        self._store: TCPStore | None = None
        self._parents: RankParents = RankParents() if beside is None else beside._parents

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        arguments: dict[str, Any] | None = None,
        *,
        backend: str | None = None,
        timeout_s: float = 180.0,
    ) -> list[Any]:
        """Call the module-level `function` with keyword `arguments` on every rank of a new world.

        Arguments and results are what `disttrain.process_group.calls.packing` knows. Returns: the results, by rank.
        Raises RankError with each failed rank's traceback, and with the stacks of those that hang or crashed.
        """
        try:
            answers = self._ask(world_size, function, arguments or {}, backend, timeout_s)
        except BaseException:
            # Workers are still at it: their late answers must not be taken for those to the next question.
            self._end_workers()
            raise
        absent = sorted(set(range(world_size)) - set(answers))
        gone = sorted(rank for rank, answer in answers.items() if answer.get("kind") == "Gone")
        if absent or gone:
            report = self._last_words(gone, absent)
            self._end_workers()
        else:
            report = ""
        failed = {rank: answers[rank]["error"] for rank in sorted(answers) if "error" in answers[rank]}
        if failed or absent:
            text = "".join(f"\n--- rank {rank} ---\n{error}" for rank, error in failed.items())
            problem = f"failed on ranks {sorted(failed)}, hung on ranks {absent} of {world_size}"
            raise RankError(function.__qualname__, f"{problem}{text}{report}")
        return [answers[rank]["value"] for rank in range(world_size)]

    def _ask(
        self,
        world_size: int,
        function: Callable[..., Any],
        arguments: dict[str, Any],
        backend: str | None,
        timeout_s: float,
    ) -> dict[int, dict[str, Any]]:
        """Hand the call to the workers, and collect their answers by rank."""
        store = self._ensure(world_size)
        job = f"job-{next(self._jobs)}"
        for rank in self._ranks[:world_size]:
            rank.ask(
                {
                    "file": str(Path(function.__code__.co_filename).resolve()),
                    "function": function.__qualname__,
                    "arguments": arguments,
                    "rank": rank.rank,
                    "world_size": world_size,
                    "host": store.host,
                    "port": store.port,
                    "job": job,
                    "backend": backend,
                    "timeout_s": timeout_s,
                }
            )
        return self._collect(world_size, timeout_s)

    def close(self) -> None:
        """End all processes. The next `run` starts new ones."""
        self._end_workers()
        if self._beside is None:
            self._parents.close()

    def _end_workers(self) -> None:
        """End the workers and their store, and forget what they may still say."""
        for rank in self._ranks:
            rank.kill()
        self._ranks = []
        self._answers = queue.Queue()
        if self._store is not None:
            self._store.close()
            self._store = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ensure(self, world_size: int) -> TCPStore:
        if any(rank.has_gone for rank in self._ranks):
            self._end_workers()
        if self._store is None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        num_before = len(self._ranks)
        try:
            parents = self._parents.first(min(world_size, _NUM_PARENTS))
            for rank in range(num_before, world_size):
                self._ranks.append(_Rank(rank, self._answers, parents[rank % _NUM_PARENTS]))
        except ConnectionError as error:
            problem = f"{error}; its log ends with\n{self._parents.said()}"
            self._end_workers()
            self._parents.close()
            raise RankError("RankPool.run", problem) from None
        self._await_start(len(self._ranks) - num_before)
        return self._store

    def _await_start(self, num_ranks: int) -> None:
        """Until so many new workers are there: loading torch must not take of a call's own time."""
        deadline = time.monotonic() + _START_S
        for _ in range(num_ranks):
            try:
                rank, answer = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                problem = f"not all of {num_ranks} workers were there after {_START_S:.0f} s."
                raise RankError("RankPool.run", problem, "Run fewer processes beside it.") from None
            if answer.get("kind") != "Ready":
                problem = f"{answer['error']}, before it was asked anything"
                raise RankError(
                    "RankPool.run", f"{problem}; its log ends with\n{self._ranks[rank].log_tail()}", rank=rank
                )

    def _collect(self, world_size: int, timeout_s: float) -> dict[int, dict[str, Any]]:
        """Answers by rank; those that don't come in time are left out."""
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + timeout_s + _GRACE_S
        while len(answers) < world_size:
            try:
                rank, answer = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            answers[rank] = answer
            if "error" in answer:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        return answers

    def _last_words(self, gone: list[int], hanging: list[int]) -> str:
        """The last output of ranks that have gone, and the stacks of those that hang, by faulthandler."""
        for rank in hanging:
            self._ranks[rank].worker.dump_stacks()
        if hanging:
            threading.Event().wait(0.5)  # faulthandler writes from a signal handler, and says nothing when it is done
        fates = [(rank, "has gone") for rank in gone] + [(rank, "hangs") for rank in hanging]
        return "".join(
            f"\n--- rank {rank} {fate}; its log ends with ---\n{self._ranks[rank].log_tail()}" for rank, fate in fates
        )
