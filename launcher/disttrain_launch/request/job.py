"""A job as one frozen value; whatever is wrong with it was refused while it was made."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from disttrain_launch.rendezvous.rounds import Terms

OPERATION = "disttrain-launch"
"""The beginning of every message of the launcher."""

STOP_SLACK_S = 20.0
"""The time that stopping workers takes beyond their own: for dumps, the kernel, and the message about it."""
UNNAMED = "none"
"""Name of a job of several nodes that was given none."""

NOT_STARTED = 2
"""Exit code when the job was not started as asked."""

STDOUT, STDERR = 1, 2
STREAM_NAMES = {STDOUT: "stdout", STDERR: "stderr"}


@dataclass(frozen=True)
class StreamChoice:
    """Some streams of some workers: 0 none, 1 stdout, 2 stderr, 3 both; for all or by local rank."""

    everywhere: int = 0
    by_local_rank: Mapping[int, int] = field(default_factory=dict)

    def has(self, local_rank: int, stream: int) -> bool:
        return bool(self.by_local_rank.get(local_rank, self.everywhere) & stream)

    @property
    def is_empty(self) -> bool:
        return not self.everywhere and not any(self.by_local_rank.values())


def parse_stream_choice(text: str) -> StreamChoice:
    """`3` (both streams of all workers) or `0:1,2:3` (by local rank). Raises ValueError."""
    if ":" not in text:
        return StreamChoice(_mask(text))
    pairs = [item.split(":") for item in text.split(",")]
    return StreamChoice(0, {int(local_rank): _mask(mask) for local_rank, mask in pairs})


def _mask(text: str) -> int:
    if text not in ("0", "1", "2", "3"):
        raise ValueError(text)
    return int(text)


@dataclass(frozen=True)
class LogPlan:
    """The choice of workers' streams that go to files under `directory`, and of those that go to the screen."""

    directory: Path | None = None
    only_file: StreamChoice = StreamChoice()
    file_and_screen: StreamChoice = StreamChoice()
    shown_local_ranks: frozenset[int] | None = None
    """None: all."""
    has_prefixes: bool = True
    folds: bool = True
    """Whether equal lines of several ranks are shown as one."""
    event_file: Path | None = None
    """The file to which node 0 writes events, as JSON."""
    is_quiet: bool = False
    """The launcher itself says only why the job failed."""
    is_verbose: bool = False
    """All ranks' last words are shown, whoever is to blame, and what C++ says."""

    @property
    def holds(self) -> bool:
        """Whether last words are held back until it is known who is to blame."""
        return not (self.is_quiet or self.is_verbose)

    @property
    def wants_all(self) -> bool:
        """Whether what ranks say that are not to blame is shown or kept, too."""
        return self.is_verbose or self.directory is not None

    def keeps(self, local_rank: int, stream: int) -> bool:
        if self.only_file.is_empty and self.file_and_screen.is_empty:
            return self.directory is not None
        return self.only_file.has(local_rank, stream) or self.file_and_screen.has(local_rank, stream)

    def shows(self, local_rank: int, stream: int) -> bool:
        if self.shown_local_ranks is not None and local_rank not in self.shown_local_ranks:
            return False
        return self.file_and_screen.has(local_rank, stream) or not self.only_file.has(local_rank, stream)


@dataclass(frozen=True)
class JobSpec:
    """One node's part of a job."""

    command: tuple[str, ...]
    """Argument vector of each worker."""
    num_local_workers: int
    num_nodes: int = 1
    """The most that there may be."""
    min_nodes: int | None = None
    """None: as many as `num_nodes`."""
    node_rank: int | None = 0
    """None: whoever gets the store's address is node 0."""
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    """Port of the launcher's store on node 0; 0 (one node only): any free one."""
    run_id: str = UNNAMED
    role: str = "default"
    num_threads: int = 1
    """Of each of several workers' CPU operators, unless the user has said."""
    numa_binding: str = "auto"
    """The cores on which workers run: a `Way`, none or auto."""
    token_file: Path | None = None
    """None: one node makes its own; several meet without one, on loopback only. `-`: it comes on standard input."""
    logs: LogPlan = LogPlan()
    stop_grace_s: float = 2.0
    """From SIGTERM to SIGKILL for those that a failing worker takes along."""
    shutdown_timeout_s: float = 30.0
    """From a signal that the launcher was sent to SIGKILL: workers may want to save."""
    join_timeout_s: float = 300.0
    """The time that too few nodes wait for more."""
    last_call_s: float = 30.0
    """The time that enough nodes wait for more."""
    close_s: float = 3.0
    """The time that node 0 waits at the end until all others have heard of it."""
    beat_s: float = 1.0
    max_missed_beats: int = 8
    """A node that is silent for so many beats is lost."""
    has_standby: bool = True
    """Whether the store of an elastic job has a standby on another node."""
    has_store_proxy: bool = True
    """Whether several workers of a node use the store of several nodes over one connection."""
    max_restarts: int = 0
    max_quick_failures: int = 3
    """See `Terms`."""
    may_differ: bool = False
    """Whether nodes may run different scripts, or with different arguments."""

    @property
    def terms(self) -> Terms:
        return Terms(
            min_nodes=self.num_nodes if self.min_nodes is None else self.min_nodes,
            max_nodes=self.num_nodes,
            max_restarts=self.max_restarts,
            join_timeout_s=self.join_timeout_s,
            last_call_s=self.last_call_s,
            keep_alive_s=self.beat_s * self.max_missed_beats,
            max_quick_failures=self.max_quick_failures,
        )

    @property
    def stop_s(self) -> float:
        """The longest that stopping the workers may take, with their dumps and children."""
        return max(self.stop_grace_s, self.shutdown_timeout_s) + self.stop_grace_s + STOP_SLACK_S

    @property
    def digest(self) -> str:
        """Equal on nodes that were asked to run the same; the interpreter's path may differ between hosts."""
        if self.may_differ:
            return ""
        return hashlib.sha256("\0".join(self.command[1:]).encode("utf-8", "surrogateescape")).hexdigest()[:16]
