"""Workers, launchers and their children die in every way; the rest goes at once and nothing is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.surroundings.programs import needs_root

if TYPE_CHECKING:
    from tests.multirank.launch.conftest import Launches

WAITING = """
    import os, time
    print("ready", os.getpid())
    time.sleep(100)
"""
STUBBORN_FAMILY = """
    import os, signal, subprocess, sys, time
    child = "import signal, time; signal.signal(15, signal.SIG_IGN); print('child', flush=True); time.sleep(100)"
    for hides in (False, True):
        process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, start_new_session=hides)
        process.stdout.readline()
    print("ready", os.getpid())
    time.sleep(100)
"""


def pids(lines: list[str]) -> dict[int, int]:
    """pid by rank, of lines like `[rank 1] ready 77`."""
    words = [line.split() for line in lines]
    return {int(word[1].rstrip("]")): int(word[3]) for word in words}


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_worker_takes_the_rest_along(launches: Launches, victim: int) -> None:
    process = launches.start("--nproc-per-node", "3", launches.script(WAITING))
    workers = pids(launches.ready(process, 3))
    os.kill(workers[victim], signal.SIGKILL)
    killed_s = time.monotonic()
    ended = launches.end(process)
    assert time.monotonic() - killed_s < 40.0
    assert ended.exit_code == 137
    assert f"disttrain-launch: rank {victim} failed first: killed by SIGKILL" in ended.stderr
    assert [pid for pid in workers.values() if psutil.pid_exists(pid)] == []
    assert launches.living() == []


def test_children_that_hide_and_ignore_are_stopped_too(launches: Launches) -> None:
    process = launches.start("--nproc-per-node", "2", "--stop-grace", "0.3", launches.script(STUBBORN_FAMILY))
    workers = pids(launches.ready(process, 2))
    assert len(launches.living()) >= 6
    os.kill(workers[1], signal.SIGKILL)
    killed_s = time.monotonic()
    assert launches.end(process).exit_code == 137
    assert time.monotonic() - killed_s < 40.0
    assert launches.living() == []


def test_children_that_outlive_a_good_end_are_stopped(launches: Launches) -> None:
    script = launches.script("""
        import subprocess, sys
        subprocess.Popen(["sleep", "100"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    """)
    assert launches.run(script).exit_code == 0
    assert launches.living() == []


def test_a_killed_launcher_leaves_no_orphan(launches: Launches) -> None:
    process = launches.start("--nproc-per-node", "2", launches.script(STUBBORN_FAMILY))
    launches.ready(process, 2)
    process.kill()
    process.wait()
    assert launches.wait_gone(60.0) == []
    assert list(launches.folder.glob("disttrain-*")) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stop_signals_are_passed_on(launches: Launches, number: signal.Signals) -> None:
    script = launches.script("""
        import os, signal, sys, time
        def save(number, frame):
            print("saved on", signal.Signals(number).name)
            sys.exit(0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, save)
        print("ready", os.getpid())
        time.sleep(100)
    """)
    process = launches.start("--nproc-per-node", "2", script)
    launches.ready(process, 2)
    process.send_signal(number)
    ended = launches.end(process)
    assert ended.exit_code == 128 + number
    assert sorted(ended.lines) == [f"[rank 0] saved on {number.name}", f"[rank 1] saved on {number.name}"]
    assert ended.stderr.splitlines()[-1] == f"disttrain-launch: stopped by {number.name}."


def test_user_signals_are_passed_on_and_the_job_goes_on(launches: Launches) -> None:
    script = launches.script("""
        import os, signal, time
        came = []
        signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
        signal.signal(signal.SIGUSR2, lambda number, frame: came.append(number))
        print("ready", os.getpid(), flush=True)
        while len(came) < 2:
            signal.pause() if not came else time.sleep(0.01)
        print("came", sorted(came))
    """)
    process = launches.start("--nproc-per-node", "2", script)
    launches.ready(process, 2)
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGUSR2)
    ended = launches.end(process)
    assert ended.exit_code == 0
    assert sorted(ended.lines) == ["[rank 0] came [10, 12]", "[rank 1] came [10, 12]"]


def test_a_second_interrupt_kills_at_once(launches: Launches) -> None:
    script = launches.script("""
        import os, signal, time
        signal.signal(signal.SIGINT, lambda number, frame: print("not yet"))
        print("ready", os.getpid())
        while True:
            time.sleep(100)
    """)
    process = launches.start("--shutdown-timeout", "200", script)
    launches.ready(process, 1)
    process.send_signal(signal.SIGINT)
    assert launches.ready(process, 1) == ["[rank 0] not yet\n"]
    process.send_signal(signal.SIGINT)
    interrupted_s = time.monotonic()
    ended = launches.end(process)
    assert ended.exit_code == 130
    assert time.monotonic() - interrupted_s < 40.0
    assert "again to kill them now" in ended.stderr


@pytest.mark.parametrize("pause_s", [0.0005, 0.004])
def test_a_storm_of_interrupts_gives_no_traceback(launches: Launches, pause_s: float) -> None:
    process = launches.start("--nproc-per-node", "2", launches.script(WAITING))
    launches.ready(process, 2)
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(pause_s)
    ended = launches.end(process)
    # The last of them may come when all is done and nobody minds it any more.
    assert ended.exit_code in (130, -signal.SIGINT)
    ours = [line for line in ended.stderr.splitlines() if not line.startswith("[rank ")]
    assert [line for line in ours if not line.startswith("disttrain-launch: ")] == []


def test_who_ignores_sigterm_is_killed_after_the_grace(launches: Launches) -> None:
    script = launches.script("""
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        print("ready", os.getpid())
        if os.environ["RANK"] == "1":
            sys.stdin.readline()
            os._exit(3)
        while True:
            time.sleep(100)
    """)
    process = launches.start("--nproc-per-node", "2", "--stop-grace", "0.4", script)
    launches.ready(process, 2)
    assert launches.end(process, limit_s=60.0).exit_code == 3


def test_an_ignored_hangup_stays_ignored(launches: Launches) -> None:
    script = launches.script("""
        import signal
        print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)
    """)
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = launches.start(script)
    finally:
        signal.signal(signal.SIGHUP, old)
    assert launches.end(process).lines == ["[rank 0] True"]


def test_when_one_rank_has_ended_well_it_is_said_who_has_not(launches: Launches) -> None:
    script = launches.script("""
        import os, time
        print("ready", os.getpid())
        if os.environ["RANK"] == "1":
            time.sleep(100)
    """)
    process = launches.start("--nproc-per-node", "2", script)
    assert process.stderr is not None
    said = "disttrain-launch: a worker of this node ended 10 s ago with exit code 0; still waiting for rank 1\n"
    assert process.stderr.readline() == said
    process.terminate()
    assert launches.end(process).exit_code == 128 + signal.SIGTERM


@pytest.fixture
def freezer() -> Iterator[Path]:
    """A control group whose processes do nothing at all while it is frozen, not even die of SIGKILL."""
    needs_root("freeze processes")
    folder = Path("/sys/fs/cgroup/freezer/disttrain-test")
    if not (folder.parent / "cgroup.procs").exists():
        pytest.skip("there is no freezer of control groups, version 1, here")
    folder.mkdir()
    yield folder
    (folder / "freezer.state").write_text("THAWED")
    until_s = time.monotonic() + 60.0
    while (folder / "cgroup.procs").read_text() and time.monotonic() < until_s:
        time.sleep(0.01)  # control groups of version 1 tell nobody
    folder.rmdir()


def test_a_worker_that_nothing_ends_is_named_and_left_behind(launches: Launches, freezer: Path) -> None:
    script = launches.script("""
        import os, time
        print("ready", os.getpid())
        if os.environ["RANK"] == "0":
            while not os.path.exists("now"):
                time.sleep(0.05)
            os._exit(3)
        time.sleep(100)
    """)
    process = launches.start("--nproc-per-node", "2", "--stop-grace", "0.2", script)
    pid = pids(launches.ready(process, 2))[1]
    (freezer / "cgroup.procs").write_text(str(pid))
    (freezer / "freezer.state").write_text("FROZEN")
    (launches.folder / "now").touch()
    ended = launches.end(process, limit_s=80.0)
    assert ended.exit_code == 3
    assert f"disttrain-launch: rank 1 (pid {pid}) is left behind: SIGKILL did not end it, its state is " in ended.stderr
    assert "rank 0 failed first: exit code 3" in ended.stderr
    (freezer / "freezer.state").write_text("THAWED")


def test_a_store_that_dies_ends_the_job_of_one_node_at_once(launches: Launches) -> None:
    process = launches.start("--nproc-per-node", "2", "--max-restarts", "3", launches.script(WAITING))
    launches.ready(process, 2)
    (server,) = [one for one in launches.living() if "disttrain.store.server" in one.cmdline()]
    server.kill()
    killed_s = time.monotonic()
    ended = launches.end(process)
    assert time.monotonic() - killed_s < 40.0
    assert ended.exit_code == 1
    assert "went away, and the job with it: its process ended." in ended.stderr
