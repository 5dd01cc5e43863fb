"""Node 0's side of the rendezvous: a shell around `rendezvous_state`, over the store.

Keys, under `launch/` (others are in `lease`): the queue `reports` is what nodes say, in the order in which it came;
`word/<agent>` is node 0's last word to a node, which watches it; `beat/<agent>` counts while a node's agent lives;
`formed` is the last round, for a successor of node 0; `awaited` tells for whom all wait, with a number that counts
while node 0 lives. So an event costs its node one message, and a round each node a handful, however many nodes there
are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from disttrain.errors import (
    RendezvousError,
    StoreAuthError,
    StoreConnectionError,
    StoreError,
    StoreTimeoutError,
)
from disttrain.store import PrefixStore, TCPStore
from disttrain.store.base import Store
from disttrain_launch.output.events import Chronicle, Record, happened
from disttrain_launch.rendezvous.lease import FORMED, Lease
from disttrain_launch.rendezvous.messages import (
    Came,
    Done,
    Ended,
    Formed,
    Happened,
    Heard,
    Run,
    Stopped,
    Word,
    decode,
    encode,
)
from disttrain_launch.rendezvous.rounds import Phase
from disttrain_launch.rendezvous.state import Command, Event, NodeLost, Rendezvous, Tell, TimePassed, Warn
from disttrain_launch.request.addresses import free_port
from disttrain_launch.request.job import OPERATION, JobSpec
from disttrain_launch.workers.outcome import Lost

ROOM = "launch"
REPORTS = "reports"
SAY_EVERY_S = 3.0
"""The interval at which a waiting node says for whom it waits."""
_TELL_EVERY_S = 1.0
"""The interval at which node 0 tells it: who says so for the first time finds it told, and what it finds is new."""
MIN_ATTEMPT_S = 0.5
MIN_WAIT_S = 0.001
WORDS_AT_ONCE = 1000

Say = Callable[[str], None]


def connect(spec: JobSpec, host: str, port: int, token: str | None, say: Say) -> TCPStore:
    """Reach node 0's store, trying until the join time is over. Raises RendezvousError."""
    where = f"{host}:{port}"
    until_s = time.monotonic() + spec.join_timeout_s
    while True:
        attempt_s = min(SAY_EVERY_S, max(until_s - time.monotonic(), MIN_ATTEMPT_S))
        try:
            return TCPStore(host, port, is_master=False, timeout=attempt_s, token=token)
        except StoreAuthError as error:
            problem = f"node 0's store at {where} and this node don't fit together: {error.problem}"
            remedy = "Every node needs the same --token-file, certificate authority and disttrain."
            raise RendezvousError(OPERATION, problem, remedy) from None
        except (StoreConnectionError, StoreTimeoutError) as error:
            left_s = until_s - time.monotonic()
            if left_s < MIN_ATTEMPT_S:
                raise RendezvousError(
                    OPERATION,
                    f"node 0 was not reached at {where} within {spec.join_timeout_s:g} s: {error.problem}",
                    "Is disttrain-launch running there with --node-rank 0, and does nothing block the port?",
                ) from None
            say(f"waiting for node 0 at {where} ({spec.join_timeout_s - left_s:.0f} s so far): {error.problem}")


class Pulse:
    """Finds agents that have fallen silent, from their beats; pure."""

    def __init__(self, keep_alive_s: float) -> None:
        self._keep_alive_s = keep_alive_s
        self._seen: dict[str, tuple[bytes, float]] = {}

    def silent(self, beats: dict[str, bytes], now_s: float) -> list[str]:
        """Agents whose beat has been the same for `keep_alive_s`; only those in `beats` are remembered."""
        self._seen = {
            agent: seen if (seen := self._seen.get(agent)) is not None and seen[0] == beat else (beat, now_s)
            for agent, beat in beats.items()
        }
        return [agent for agent, (_, since_s) in self._seen.items() if now_s - since_s >= self._keep_alive_s]


class Leader:
    """Hears reports, keeps time and beats, and carries out what the machine decides, in a thread of its own.

    Args: store  of the job;  machine  with node 0 as its leader;  chronicle  of the job;  write  keeps what happened;
          beat_s  how often nodes beat;  close_s  how long it waits at the end until all have heard that it is over;
          say  to whoever started this launcher;  begun  is told each round that begins, and the nodes;
          lease  node 0's, where another may take it;  torch_addr  where rank 0 is, if not where the job was told.
    """

    def __init__(
        self,
        store: Store,
        machine: Rendezvous,
        chronicle: Chronicle,
        write: Callable[[Iterable[Record]], None],
        *,
        beat_s: float,
        close_s: float,
        say: Say,
        begun: Callable[[int, list[str]], None] = lambda _round, _agents: None,
        lease: Lease | None = None,
        torch_addr: str = "",
    ) -> None:
        self._store = PrefixStore(ROOM, store)
        self._machine = machine
        self._chronicle = chronicle
        self._write = write
        self._lease = lease
        self._torch_addr = torch_addr
        self._beat_s = beat_s
        self._close_s = close_s
        self._say = say
        self._begun = begun
        self._num_said = 0
        self.job = chronicle.state(machine.phase, machine.awaited)
        """The state of the job, for any thread."""
        self._pulse = Pulse(machine.terms.keep_alive_s)
        self._said_s = self._looked_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="rendezvous", daemon=True)

    def start(self) -> None:
        """Return at once."""
        self._thread.start()

    def join(self) -> None:
        """Wait until all nodes have heard how it ended, `close_s` at most."""
        self._thread.join(self._close_s)

    def log(self, event: str, **fields: Any) -> None:
        """Write down what this node alone knows."""
        self._write([happened(event, **fields)])

    def step(self) -> None:
        """Wait for the next report or deadline, and do what follows from it."""
        event = self._next_event()
        if event is not None:
            self._handle(event, time.monotonic())

    def _run(self) -> None:
        try:
            while self._machine.phase is not Phase.OVER:
                self.step()
            until_s = time.monotonic() + self._close_s
            while self._machine.num_unaware and time.monotonic() < until_s:
                self.step()
        except StoreError:
            pass  # This node's own link meets the same and says so.
        except Exception as error:
            self._tell({f"word/{agent}": Done(Lost(f"node 0 failed: {error!r}")) for agent in self._machine.everyone})
            raise

    def _handle(self, event: Event, now_s: float) -> None:
        commands = self._machine.handle(event, now_s)
        self._write(self._chronicle.follow(event, commands))
        self._carry_out(commands)
        if commands or isinstance(event, TimePassed):
            self.job = self._chronicle.state(self._machine.phase, self._machine.awaited)

    def _next_event(self) -> Event | None:
        now_s = time.monotonic()
        deadline_s = self._machine.deadline_s
        look_s = min(self._looked_s + self._beat_s, self._said_s + _TELL_EVERY_S)
        wait_s = (look_s if deadline_s is None else min(look_s, deadline_s)) - now_s
        try:
            report = decode(self._store.queue_pop(REPORTS, timeout=max(wait_s, MIN_WAIT_S)))
            if isinstance(report, Came | Ended | Stopped | Heard):
                return report
            if isinstance(report, Happened):
                self._write(report.records)
        except StoreTimeoutError:
            return self._look_around()
        except ValueError as error:
            self._say(f"a report of another node is not understood: {error}")
        return None

    def _look_around(self) -> Event:
        """Does what is due when nothing was reported."""
        try:
            self._say_and_listen(time.monotonic())
        except StoreTimeoutError:
            pass  # A store that is slow to answer is not gone yet.
        return TimePassed()

    def _say_and_listen(self, now_s: float) -> None:
        if now_s - self._said_s >= _TELL_EVERY_S:
            self._said_s = now_s
            self._num_said += 1
            self._store.set("awaited", f"{self._num_said} {self._machine.awaited}")
        if now_s - self._looked_s >= self._beat_s:
            self._looked_s = now_s
            if self._lease is not None:
                self._lease.check()
                self._lease.choose_standby(self._machine.agents)
            for agent in self._silent(now_s):
                self._handle(NodeLost(agent), now_s)

    def _silent(self, now_s: float) -> list[str]:
        agents = self._machine.agents
        beats = self._store.multi_get([f"beat/{agent}" for agent in agents]) if agents else []
        return self._pulse.silent(dict(zip(agents, beats, strict=True)), now_s)

    def _carry_out(self, commands: list[Command]) -> None:
        words: dict[str, Word | Formed] = {}
        torch_port = 0
        for command in commands:
            match command:
                case Tell(agent, Run() as run):
                    # Each round gets another: what is left of the last one may still hold the old.
                    if not torch_port:
                        torch_port = free_port()
                        self._begun(run.assignment.round, self._machine.everyone)
                    words[f"word/{agent}"] = replace(run, torch_port=torch_port, torch_addr=self._torch_addr)
                case Tell(agent, word):
                    words[f"word/{agent}"] = word
                case Formed():
                    # Before its first word: no node runs in a round that a successor does not know.
                    words[FORMED] = command
                case Warn(text):
                    self._say(text)
        self._tell(words)

    def _tell(self, words: dict[str, Word | Formed]) -> None:
        if words and self._lease is not None:
            self._lease.check()
        values = [(key, encode(value)) for key, value in words.items()]
        for first in range(0, len(values), WORDS_AT_ONCE):
            self._set(*zip(*values[first : first + WORDS_AT_ONCE], strict=True))

    def _set(self, keys: tuple[str, ...], values: tuple[bytes, ...]) -> None:
        while True:
            try:
                return self._store.multi_set(keys, values)
            except StoreTimeoutError:
                continue  # As above; a word that is said twice is heard once.
