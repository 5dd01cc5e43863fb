"""Find and stop every process that a job's workers left behind, however far it wandered.

A worker's descendants carry its environment, in which DISTTRAIN_AGENT names the agent that started it (the idea of
Jenkins' process tree killer), or at least belong to its session. Both are looked up in Linux's /proc; processes are
held by pidfd while they are looked at and signalled, so that a number that was given out again is never hit.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Collection

from disttrain import settings

MAX_ROUNDS = 20
KILL_WAIT_S = 3.0


def stop_leftovers(agent: str, sessions: Collection[int], grace_s: float) -> list[int]:
    """Stop what is left of `agent`: SIGTERM, and SIGKILL after `grace_s`. Returns whom even that did not end."""
    _signal_and_wait(_find(agent, sessions), signal.SIGTERM, grace_s)
    killed: set[int] = set()
    for _ in range(MAX_ROUNDS):  # Whoever forks while it is being looked for is found in the next round.
        remaining = _find(agent, sessions, killed)
        if not remaining:
            break
        killed |= _signal_and_wait(remaining, signal.SIGKILL, KILL_WAIT_S)
    return sorted(killed)


def state_of(pid: int) -> str:
    """The kernel's word for the state of this process, as `D (disk sleep)`; empty when it is gone."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("State:")), "")
    except OSError:
        return ""


def _find(agent: str, sessions: Collection[int], but: Collection[int] = ()) -> dict[int, int]:
    """pidfds, by pid, of live processes of this agent; itself, zombies and `but` left out."""
    processes = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if not name.isdigit() or int(name) == os.getpid() or int(name) in but:
            continue
        try:
            pidfd = os.pidfd_open(int(name))
        except OSError:
            continue
        if _belongs(int(name), agent, sessions):
            processes[int(name)] = pidfd
        else:
            os.close(pidfd)
    return processes


def _belongs(pid: int, agent: str, sessions: Collection[int]) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command name may hold spaces and parentheses; the fields after it don't.
            state, _parent, _group, session = file.read().rpartition(b")")[2].split()[:4]
        if state == b"Z":
            return False
        if int(session) in sessions:
            return True
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = b"\0" + file.read() + b"\0"
    except OSError:  # Gone meanwhile, or somebody else's.
        return False
    # A launcher inside a worker appends its own name, so that the outer one still finds what the inner one started.
    marker = f"\0{settings.AGENT.name}={agent}".encode()
    return marker + b"\0" in variables or marker + b"/" in variables


def _signal_and_wait(processes: dict[int, int], number: signal.Signals, wait_s: float) -> set[int]:
    """Signal all, wait until they are gone or time is up, close the pidfds. Returns who is left."""
    gone = select.poll()
    pid_of = {pidfd: pid for pid, pidfd in processes.items()}
    for pidfd in pid_of:
        try:
            signal.pidfd_send_signal(pidfd, number)
        except OSError:
            pass  # It went by itself.
        gone.register(pidfd, select.POLLIN)
    deadline_s = time.monotonic() + wait_s
    waiting = set(pid_of)
    while waiting and (left_s := deadline_s - time.monotonic()) > 0:
        for pidfd, _ in gone.poll(left_s * 1000):
            gone.unregister(pidfd)
            waiting.discard(pidfd)
    for pidfd in pid_of:
        os.close(pidfd)
    return {pid_of[pidfd] for pidfd in waiting}
