"""Jobs with one fault each, drawn by a seed, and how such a job may end; pure."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass

INNER = ("exit 3", "exit 0", "raise", "segfault", "hang")
"""What a worker does by itself, at some step."""
OUTER = {
    "worker": ("SIGKILL", "SIGTERM", "SIGSTOP"),
    "agent": ("SIGKILL", "SIGTERM", "SIGINT", "short stop", "long stop"),
    "store": ("SIGKILL",),
    "warden": ("SIGKILL",),
}
"""What is done to processes, at some moment."""
SHORT_STOP_S, LONG_STOP_S = 1.0, 7.0
KEEP_ALIVE_S = 4.0
JOIN_S = 10.0
NUM_STEPS = 120
LOST = (
    r"gave no sign of life|went away|did not come|came within|was not reached|were left|said nothing|the server ended"
)


@dataclass(frozen=True)
class Plan:
    """One job, and its fault."""

    seed: int
    num_nodes: int
    num_local_workers: int
    is_elastic: bool
    max_restarts: int
    has_children: bool
    """Whether workers have children in sessions of their own."""
    victim: str
    number: int
    """Rank of the worker, or number of the node."""
    action: str
    step: int
    """When, for what a worker does by itself."""
    after_ready: bool
    """Whether what is done from outside waits until all workers are ready."""
    at_s: float
    """And how long it waits then."""

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.num_local_workers

    @property
    def node(self) -> int:
        """Where it happens."""
        return self.number // self.num_local_workers if self.victim == "worker" else self.number

    def __str__(self) -> str:
        nodes = f"{'1:' if self.is_elastic else ''}{self.num_nodes} x {self.num_local_workers}"
        start = "ready" if self.after_ready else "start"
        when = f"step {self.step}" if self.action in INNER else f"{start}+{self.at_s:.2f} s"
        what = f"{self.victim} {self.number} {self.action}"
        return f"seed {self.seed}: {nodes}, {self.max_restarts} restarts, {what} at {when}"


def draw(seed: int) -> Plan:
    """The same plan for the same seed."""
    random_of = random.Random(seed)
    num_nodes, num_local_workers = random_of.choice([(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1), (3, 2)])
    victim = random_of.choice(["worker", "worker", "worker", "agent", "agent", "store", "warden"])
    actions = list(OUTER[victim])
    if victim == "worker":
        actions += INNER
        if num_nodes * num_local_workers == 1:
            # Nobody misses a rank that is alone.
            actions = [action for action in actions if action not in ("SIGSTOP", "hang", "exit 0")]
    number = random_of.randrange({"worker": num_nodes * num_local_workers, "store": 1}.get(victim, num_nodes))
    return Plan(
        seed=seed,
        num_nodes=num_nodes,
        num_local_workers=num_local_workers,
        is_elastic=num_nodes > 1 and random_of.random() < 0.4,
        max_restarts=random_of.choice([0, 0, 1, 2]),
        has_children=random_of.random() < 0.5,
        victim=victim,
        number=number,
        action=random_of.choice(actions),
        step=random_of.randrange(NUM_STEPS),
        after_ready=random_of.random() < 0.6,
        at_s=random_of.uniform(0.0, 1.0),
    )


@dataclass(frozen=True)
class Expected:
    """Exit codes that the launchers of the victim's node and of the others may have, and what the others say why."""

    own: frozenset[int]
    others: frozenset[int]
    cause: str = ""
    """A regular expression; sought in the stderr of launchers that may still say it."""


def _expected(own: set[int], others: set[int] | None = None, cause: str = "") -> Expected:
    return Expected(frozenset(own), frozenset(own if others is None else others), cause)


def expectation(plan: Plan, *, was_ready: bool) -> Expected:
    """How a job ends whose fault happened; `was_ready`: all workers had met before."""
    if plan.victim == "worker":
        return _after_worker(plan)
    if plan.victim == "warden":
        return _expected({0})
    if plan.victim == "store":
        # With a standby the job goes on, if that has caught up.
        return _expected({0, 1, 2}) if plan.is_elastic else _expected({1, 2}, cause=LOST)
    return _after_agent(plan, was_ready=was_ready)


def _after_worker(plan: Plan) -> Expected:
    if plan.max_restarts:
        return _expected({0}, cause=rf"restart 1 of {plan.max_restarts}")
    ends = {"SIGKILL": "killed by SIGKILL", "SIGTERM": "killed by SIGTERM", "segfault": "killed by SIGSEGV"}
    ends |= {"exit 3": "exit code 3", "raise": "exit code 1"}
    if plan.action not in ends:
        # The others miss it.
        return _expected({1}, cause=rf"rank (?!{plan.number} )\d+ failed first: exit code 1")
    codes = {"SIGKILL": 137, "SIGTERM": 143, "segfault": 139, "exit 3": 3, "raise": 1}
    return _expected({codes[plan.action]}, cause=rf"rank {plan.number} failed first: {ends[plan.action]}")


def _after_agent(plan: Plan, *, was_ready: bool) -> Expected:
    goes_on = plan.is_elastic and plan.node != 0
    if plan.action == "short stop":
        return _expected({0})
    if plan.action == "long stop":
        if plan.node == 0:
            return _expected({0})  # The store is a process of its own, and workers need no agent.
        own = {0, 1} if was_ready else {0, 1, 2}
        return _expected(own, {0} if goes_on else {1}, "" if goes_on else LOST)
    number = signal.Signals[plan.action]
    own = {-number} if number == signal.SIGKILL else {128 + number, -number}
    if goes_on:
        return _expected(own, {0})
    if plan.is_elastic and number == signal.SIGKILL:
        return _expected(own, {0, 1, 2})  # As above.
    # Who was there already ends with it, at once; who was not is missed, or misses the store.
    told = {1} if number == signal.SIGKILL else {128 + number, 1}
    cause = LOST if number == signal.SIGKILL else rf"stopped by {plan.action}|{LOST}"
    return _expected(own, told if was_ready else {*told, 2}, cause)
