"""A job fails: the launcher has the rest dump, keeps the ring of who was killed, and says what they tell."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from disttrain.flight_recorder import analyze

if TYPE_CHECKING:
    from tests.multirank.launch.conftest import Launches

FAILING = """
    import os, time, torch
    import disttrain

    disttrain.init_process_group(timeout=100)
    rank = disttrain.get_rank()
    others = disttrain.new_group([0, 2])
    disttrain.all_reduce(torch.ones(4))
    if rank != 1:
        disttrain.all_reduce(torch.ones(4), group=others)
    if rank == 2:
        print("ready", flush=True)
        time.sleep(100)  # here
    if rank == 0:
        disttrain.all_reduce(torch.ones(4), group=others)  # waiting
    while not os.path.exists("now"):
        time.sleep(0.05)
    time.sleep(1.5)  # a shorter wait is no hang
    os.kill(os.getpid(), 9)
"""
OTHER = """
    import os, time
    time.sleep(100 if os.environ["RANK"] == "0" else 0)
    raise SystemExit(3)
"""


def test_the_verdict_is_printed_and_the_dumps_are_kept(forked_launches: Launches) -> None:
    script = forked_launches.folder / forked_launches.script(FAILING)
    process = forked_launches.start("--nproc-per-node", "3", "--log-dir", "logs", str(script))
    assert forked_launches.ready(process, 1) == ["[rank 2] ready\n"]
    (forked_launches.folder / "now").touch()
    ended = forked_launches.end(process)
    assert ended.exit_code == 128 + signal.SIGKILL
    folder = forked_launches.folder / "logs" / "flight"
    analysis = analyze(folder)
    assert [(dump.rank, dump.reason) for dump in analysis.dumps] == [(0, "SIGUSR2"), (1, "ring"), (2, "SIGUSR2")]
    assert "disttrain-launch: flight recorder: Rank 2 did not come to all_reduce #2 of group " in ended.stderr
    assert f"it is in Python at {script}:{_line_of('here')} in <module>" in ended.stderr
    assert f"more: disttrain-flight {folder}" in ended.stderr


def test_when_the_launcher_is_killed_the_rings_are_kept(launches: Launches) -> None:
    script = launches.script("""
        import disttrain, time, torch
        disttrain.init_process_group(timeout=100)
        disttrain.all_reduce(torch.ones(4))
        print("ready", flush=True)
        time.sleep(100)
    """)
    process = launches.start("--nproc-per-node", "2", "--log-dir", "logs", script)
    launches.ready(process, 2)
    process.kill()
    launches.end(process)
    folder = launches.folder / "logs" / "flight"
    launches.wait_gone(60.0)
    assert [ring.is_symlink() for ring in folder.glob("*.ring")] == [False, False]
    assert [len(dump.records) for dump in analyze(folder).dumps] == [1, 1]


def test_what_an_exception_says_is_on_the_screen_and_not_in_the_event_log(forked_launches: Launches) -> None:
    script = forked_launches.script("""
        import disttrain, torch
        disttrain.init_process_group(timeout=100)
        if disttrain.get_rank():
            raise ValueError("password")
        disttrain.all_reduce(torch.ones(4))
    """)
    ended = forked_launches.run("--nproc-per-node", "2", "--log-dir", "logs", script)
    assert "it ended with ValueError (password)" in ended.stderr
    text = (forked_launches.folder / "logs" / "events.jsonl").read_text()
    assert "password" not in text
    (verdict,) = [one for one in map(json.loads, text.splitlines()) if one["event"] == "verdict"]
    assert (verdict["kind"], verdict["ranks"], verdict["cause"]) == ("rank_absent", [1], "raised")
    assert verdict["dumps"] == str(forked_launches.folder / "logs" / "flight")


def test_a_worker_that_cannot_dump_gets_its_grace_all_the_same(forked_launches: Launches) -> None:
    (forked_launches.folder / "file").touch()
    script = forked_launches.script("""
        import disttrain, signal, sys, time
        disttrain.init_process_group(timeout=100)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("saved"))
        disttrain.barrier()
        if disttrain.get_rank():
            sys.exit(3)
        time.sleep(100)
    """)
    dumps = str(forked_launches.folder / "file" / "dumps")
    ended = forked_launches.run("--nproc-per-node", "2", script, DISTTRAIN_FLIGHT_DIR=dumps)
    assert ended.exit_code == 3
    assert "[rank 0] saved" in ended.stderr


def _line_of(comment: str) -> int:
    return next(number for number, line in enumerate(FAILING.splitlines(), 1) if line.endswith(f"# {comment}"))


RAISING = """
    import sys, torch
    import disttrain

    disttrain.init_process_group(timeout=60)
    disttrain.all_reduce(torch.ones(4))
    print("ready", flush=True)
    if sys.argv[1:] == ["stay"]:
        sys.stdin.read()
        import time; time.sleep(100)
    if sys.argv[1:] == ["raise"] and disttrain.get_rank() == 1:
        raise ValueError("bad batch")
    disttrain.all_reduce(torch.ones(4))
    disttrain.destroy_process_group()
"""


def _kept(launches: Launches) -> list[Path]:
    """Folders of jobs; all else that launchers make in the folder for temporary files is gone."""
    private = launches.folder / f"disttrain-flight-{os.getuid()}"
    assert [*launches.folder.glob("disttrain-*")] in ([], [private])
    return sorted(private.glob("*"))


def test_without_logs_a_job_that_fails_has_a_verdict_too_and_its_dumps_are_kept(forked_launches: Launches) -> None:
    ended = forked_launches.run("--nproc-per-node", "2", forked_launches.script(RAISING), "raise")
    assert ended.exit_code == 1
    assert "disttrain-launch: flight recorder: Rank 1 did not come to all_reduce #2 of group world" in ended.stderr
    assert "it ended with ValueError (bad batch)" in ended.stderr
    (folder,) = _kept(forked_launches)
    assert f"more: disttrain-flight {folder}\n" in ended.stderr
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [dump.rank for dump in analyze(folder).dumps] == [0, 1]
    shutil.rmtree(folder.parent)


def test_of_a_job_that_ends_well_nothing_is_left(forked_launches: Launches) -> None:
    ended = forked_launches.run("--nproc-per-node", "2", forked_launches.script(RAISING))
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert _kept(forked_launches) == []


def test_dumps_that_were_asked_for_are_kept(forked_launches: Launches) -> None:
    process = forked_launches.start("--nproc-per-node", "2", forked_launches.script(RAISING), "stay")
    forked_launches.ready(process, 2)
    process.send_signal(signal.SIGUSR2)
    deadline_s = time.monotonic() + 240
    while len(list(forked_launches.folder.glob("disttrain-*/flight/*.flight"))) < 2:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)  # a process that dumps tells nobody
    process.send_signal(signal.SIGTERM)
    ended = forked_launches.end(process)
    assert ended.exit_code == 128 + signal.SIGTERM
    (folder,) = _kept(forked_launches)
    assert (
        f"flight recorder: there are dumps from while the job ran.\n    more: disttrain-flight {folder}" in ended.stderr
    )
    assert [dump.reason for dump in analyze(folder).dumps] == ["SIGUSR2", "SIGUSR2"]
    shutil.rmtree(folder.parent)


def test_who_does_not_record_is_not_signalled(launches: Launches) -> None:
    ended = launches.run("--nproc-per-node", "2", "--log-dir", "logs", launches.script(OTHER))
    assert ended.exit_code == 3
    assert "flight recorder" not in ended.stderr
    assert "rank 1 failed first: exit code 3" in ended.stderr
