"""A job fails: the launcher has the rest dump, keeps the ring of who was killed, and says what they tell."""

from __future__ import annotations

import signal
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


def test_the_verdict_is_printed_and_the_dumps_are_kept(launches: Launches) -> None:
    process = launches.start("--nproc-per-node", "3", "--log-dir", "logs", launches.script(FAILING))
    assert launches.ready(process, 1) == ["[rank 2] ready\n"]
    (launches.folder / "now").touch()
    ended = launches.end(process)
    assert ended.exit_code == 128 + signal.SIGKILL
    folder = launches.folder / "logs" / "flight"
    analysis = analyze(folder)
    assert [(dump.rank, dump.reason) for dump in analysis.dumps] == [(0, "SIGUSR2"), (1, "ring"), (2, "SIGUSR2")]
    assert "disttrain-launch: flight recorder: Rank 2 did not come to all_reduce #2 of group " in ended.stderr
    assert f"it is in Python at {launches.folder / 'script.py'}:{_line_of('here')} in <module>" in ended.stderr
    assert f"more: disttrain-flight {folder}" in ended.stderr


def _line_of(comment: str) -> int:
    return next(number for number, line in enumerate(FAILING.splitlines(), 1) if line.endswith(f"# {comment}"))


def test_who_does_not_record_is_not_signalled(launches: Launches) -> None:
    ended = launches.run("--nproc-per-node", "2", "--log-dir", "logs", launches.script(OTHER))
    assert ended.exit_code == 3
    assert "flight recorder" not in ended.stderr
    assert "rank 1 failed first: exit code 3" in ended.stderr
