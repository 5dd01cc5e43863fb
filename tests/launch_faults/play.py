"""Play one plan in namespaces of its own, where every process, port and file is the job's, and see what is left.

Called as `python -m tests.launch_faults.play SEED FOLDER` within those; prints a Result as JSON. When it ends, the
kernel ends whatever it has left.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.launch_faults import worker
from tests.launch_faults.plan import (
    INNER,
    JOIN_S,
    KEEP_ALIVE_S,
    LONG_STOP_S,
    NUM_STEPS,
    SHORT_STOP_S,
    Plan,
    draw,
    expectation,
)

PORT = 29500
LIMIT_S = 200.0
"""From a fault to the end of all launchers."""
GONE_S = 40.0
"""From their end until what they left must be gone: a warden waits for the grace of those it stops."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  this job's own


@dataclass
class Result:
    """What became of a plan; nothing is wrong when `wrong` is empty."""

    plan: str
    fault: str
    codes: list[int | None] = field(default_factory=list)
    landed: bool = False
    ended_s: float = 0.0
    wrong: list[str] = field(default_factory=list)
    stderr: list[str] = field(default_factory=list)


class Launcher:
    """One node's launcher, and all that it has printed."""

    def __init__(self, plan: Plan, node: int, folder: Path) -> None:
        nodes = f"1:{plan.num_nodes}" if plan.is_elastic else str(plan.num_nodes)
        beats = f"keep_alive_interval={KEEP_ALIVE_S / 10},keep_alive_max_attempt=10"
        task = {"num_steps": NUM_STEPS, "has_children": plan.has_children, "action": plan.action}
        is_inner = plan.action in INNER
        task |= {"rank": plan.number if is_inner else None, "step": plan.step}
        meeting = (
            ["--nnodes", nodes, "--node-rank", str(node), "--master-port", str(PORT)] if plan.num_nodes > 1 else []
        )
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "disttrain_launch", *meeting, "--stop-grace", "1", "--shutdown-timeout", "3"),
                *("--nproc-per-node", str(plan.num_local_workers), "--max-restarts", str(plan.max_restarts)),
                *(
                    "--rdzv-conf",
                    f"join_timeout={JOIN_S},last_call_timeout=1,{beats}",
                    worker.__file__,
                    json.dumps(task),
                ),
            ],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self.pumps = [threading.Thread(target=self._pump, args=(name,), daemon=True) for name in self.lines]
        for pump in self.pumps:
            pump.start()

    def said(self, word: str) -> int:
        """How many workers said it."""
        return sum(f" {word} " in line for line in self.lines["stdout"])

    def _pump(self, name: str) -> None:
        for line in getattr(self.process, name):
            self.lines[name].append(line)


def processes() -> Iterator[tuple[int, list[str], dict[str, str]]]:
    """(pid, argv, environment) of all but this one that live."""
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            argv = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            pairs = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace").split("\0")
        except OSError:
            continue
        if pid != os.getpid() and state not in "ZX":
            yield pid, argv, dict(pair.partition("=")[::2] for pair in pairs)


def victim_of(plan: Plan, launchers: list[Launcher]) -> int | None:
    """The pid of the process that the plan's fault is for; None where there is none (yet, or any more)."""
    if plan.victim == "agent":
        return launchers[plan.number].process.pid if launchers[plan.number].process.poll() is None else None
    for pid, argv, environ in processes():
        is_worker = worker.__file__ in argv and "RANK" in environ
        if plan.victim == "worker" and is_worker and environ["RANK"] == str(plan.number):
            return pid
        if plan.victim == "store" and "disttrain.store.server" in argv:
            return pid
        # The warden is a fork of its agent.
        if (
            plan.victim == "warden"
            and "disttrain_launch" in argv
            and parent_of(pid) == launchers[plan.number].process.pid
        ):
            return pid
    return None


def parent_of(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def wait_until(is_so: Callable[[], bool], limit_s: float) -> bool:
    until_s = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.01)  # processes and files tell nobody
    return True


def strike(plan: Plan, launchers: list[Launcher]) -> bool:
    """Do what the plan says; False where there was nobody left to do it to."""
    pids: list[int] = []

    def found() -> bool:
        pid = victim_of(plan, launchers)
        if pid is not None:
            pids.append(pid)
        return pid is not None or all(launcher.process.poll() is not None for launcher in launchers)

    wait_until(found, LIMIT_S)
    if not pids:
        return False
    try:
        if plan.action.endswith("stop"):
            os.kill(pids[0], signal.SIGSTOP)
            time.sleep(SHORT_STOP_S if plan.action == "short stop" else LONG_STOP_S)
            os.kill(pids[0], signal.SIGCONT)
        else:
            os.kill(pids[0], signal.Signals[plan.action])
    except ProcessLookupError:
        return False
    return True


def left_over(folder: Path) -> list[str]:
    """Whatever of the job is still there."""
    left = [f"process {pid}: {' '.join(argv)[:120]}" for pid, argv, _ in processes()]
    for name in ("tcp", "tcp6"):
        lines = Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        left += [f"listening: {line.split()[1]}" for line in lines if line.split()[3] == "0A"]
    left += [f"file {path}" for path in SHARED_MEMORY.iterdir()]
    left += [f"file {path}" for path in folder.rglob("*") if not path.is_dir() or path.name.startswith("disttrain")]
    return left


def play(plan: Plan, folder: Path) -> Result:
    result = Result(str(plan), f"{plan.victim} {plan.action}")
    launchers = [Launcher(plan, node, folder) for node in range(plan.num_nodes)]

    def all_ready() -> bool:
        ready = sum(launcher.said("ready") for launcher in launchers)
        return ready >= plan.num_ranks or all(launcher.process.poll() is not None for launcher in launchers)

    if plan.action in INNER:
        result.landed = was_ready = True
    else:
        if plan.after_ready:
            wait_until(all_ready, LIMIT_S)
        time.sleep(plan.at_s)
        was_ready = sum(launcher.said("ready") for launcher in launchers) >= plan.num_ranks
        result.landed = strike(plan, launchers)
    struck_s = time.monotonic()
    if not wait_until(lambda: all(launcher.process.poll() is not None for launcher in launchers), LIMIT_S):
        result.wrong.append(f"it had not ended {LIMIT_S:g} s later: {left_over(folder)}")
    result.ended_s = round(time.monotonic() - struck_s, 2)
    result.codes = [launcher.process.poll() for launcher in launchers]
    if not result.wrong:
        for launcher in launchers:
            for pump in launcher.pumps:
                pump.join(GONE_S)
        if not wait_until(lambda: not left_over(folder), GONE_S):
            result.wrong += left_over(folder)
    result.stderr = ["".join(launcher.lines["stderr"]) for launcher in launchers]
    judge(plan, result, launchers, was_ready=was_ready)
    return result


def judge(plan: Plan, result: Result, launchers: list[Launcher], *, was_ready: bool) -> None:
    """Compare with what the plan lets expect."""
    expected = expectation(plan, was_ready=was_ready)
    # A fault in a job's last moments may find it done.
    is_done = any(launcher.said("done") for launcher in launchers) and plan.action not in INNER
    if not result.landed or (is_done and not any(result.codes)):
        if any(result.codes):
            result.wrong.append("nothing happened to it, and it failed")
        return
    for node, code in enumerate(result.codes):
        allowed = expected.own if node == plan.node else expected.others
        if code not in allowed and not (is_done and code == 0):
            result.wrong.append(f"node {node} ended with {code}, not one of {sorted(allowed)}")
    for node, text in enumerate(result.stderr):
        ours = [line for line in text.splitlines() if not line.startswith(("[rank", "    "))]
        strange = [line for line in ours if not line.startswith(("disttrain-launch: ", "disttrain store: "))]
        is_struck = plan.victim == "agent" and node == plan.node
        # Python itself prints one when it is interrupted while it still imports.
        if strange and not (is_struck and strange[-1].startswith("KeyboardInterrupt")):
            result.wrong.append(f"node {node} said {strange[:3]}")
        if not is_struck and expected.cause and not is_done and not re.search(expected.cause, text):
            result.wrong.append(f"node {node} did not say {expected.cause!r}")


def settle_in(folder: Path) -> None:
    """Files of nobody else in the places where a job may leave some."""
    for place in (folder, SHARED_MEMORY):
        subprocess.run(["mount", "-t", "tmpfs", "none", str(place)], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for name in ("TMPDIR", "XDG_RUNTIME_DIR"):
        (folder / name).mkdir()
        os.environ[name] = str(folder / name)


if __name__ == "__main__":
    where = Path(sys.argv[2])
    settle_in(where)
    print(json.dumps(asdict(play(draw(int(sys.argv[1])), where))))
