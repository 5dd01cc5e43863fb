"""A rank fails: a person reads of it last and whole, and of the others a line."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import subprocess

    from tests.multirank.launch.conftest import Ended, Launches

FAILING = """
    import os, signal, sys, time, torch
    import disttrain

    def load_batch(number):
        raise ValueError(f"bad batch {number}")

    disttrain.init_process_group(timeout=240)
    rank, kind, culprits = disttrain.get_rank(), sys.argv[1], [int(word) for word in sys.argv[2].split(",")]
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    disttrain.all_reduce(torch.ones(4))
    store, num_others = disttrain.current_world().store, disttrain.get_world_size() - len(culprits)
    if rank in culprits:
        while store.add(f"waiting {attempt}", 0) < num_others:
            time.sleep(0.02)
        time.sleep(0.3)
        if kind == "raise":
            load_batch(f"{rank}.{attempt}")
        if kind == "exit":
            os._exit(7)
        if kind == "text":
            sys.exit("no such file: a.yaml")
        if kind == "chain":
            try:
                load_batch(rank)
            except ValueError as error:
                raise RuntimeError("no data") from error
        if kind == "slow":
            import atexit
            atexit.register(time.sleep, 1.0)
            load_batch(rank)
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "segfault": signal.SIGSEGV, "abort": signal.SIGABRT}[kind])
    store.add(f"waiting {attempt}", 1)
    disttrain.all_reduce(torch.ones(4))
"""


@pytest.fixture(autouse=True)
def without_dumps(forked_launches: Launches) -> Iterator[None]:
    """Jobs that fail leave their dumps."""
    yield
    for folder in forked_launches.folder.glob("disttrain-flight-*"):
        shutil.rmtree(folder)


def told(ended: Ended) -> list[str]:
    """The lines on stderr, of which those of ranks have their prefix."""
    return ended.stderr.splitlines()


def nodes(launches: Launches, port: int, *argv: str) -> list[Ended]:
    """Two nodes with two workers each."""
    flags = ("--nproc-per-node", "2", "--nnodes", "2", "--master-port", str(port))
    started: list[subprocess.Popen[str]] = [
        launches.start(*flags, "--node-rank", str(rank), *argv) for rank in range(2)
    ]
    return [launches.end(node) for node in started]


@pytest.mark.parametrize(
    ("kind", "reason", "exit_code"),
    [
        ("raise", "ValueError: bad batch 1.0", 1),
        ("slow", "ValueError: bad batch 1", 1),
        ("chain", "RuntimeError: no data", 1),
        ("exit", "exit code 7", 7),
        ("text", "exit code 1, last on stderr: no such file: a.yaml", 1),
        ("kill", "killed by SIGKILL", 128 + signal.SIGKILL),
        ("segfault", "killed by SIGSEGV", 128 + signal.SIGSEGV),
        ("abort", "killed by SIGABRT", 128 + signal.SIGABRT),
    ],
)
def test_the_culprit_s_words_are_last_and_the_others_have_a_line(
    forked_launches: Launches, kind: str, reason: str, exit_code: int
) -> None:
    ended = forked_launches.run("--nproc-per-node", "3", forked_launches.script(FAILING), kind, "1")
    assert ended.exit_code == exit_code
    lines = told(ended)
    assert [line for line in lines if "stopped because" in line] == [
        f"disttrain-launch: ranks 0, 2: stopped because rank 1 failed: {reason}"
    ], ended.stderr
    assert not [line for line in lines if re.match(r"\[rank [02]\]", line)], ended.stderr
    raised = {"raise": 1, "slow": 1, "chain": 2}.get(kind, 0)
    assert ended.stderr.count("Traceback (most recent call last):") == raised
    first = next(number for number, line in enumerate(lines) if "stopped because" in line)
    assert all("Traceback" not in line for line in lines[:first])
    assert "rank 1 failed first: " in ended.stderr
    if raised:
        assert f"    {reason}" in lines[first:]
        assert "in load_batch" in ended.stderr


def test_where_a_signal_came_to_the_culprit_is_told(launches: Launches) -> None:
    script = launches.script("""
        import ctypes, os, time

        def load_batch():
            ctypes.string_at(0)

        if os.environ["RANK"] == "1":
            load_batch()
        time.sleep(60)
    """)
    ended = launches.run("--nproc-per-node", "2", script)
    assert ended.exit_code == 128 + signal.SIGSEGV
    lines = told(ended)
    assert "disttrain-launch: rank 0: stopped because rank 1 failed: Fatal Python error: Segmentation fault" in lines
    assert any(line.startswith("      File ") and line.endswith(" in load_batch") for line in lines), ended.stderr
    assert "Extension modules" not in ended.stderr


SHARDED = """
    import os, sys, torch
    import disttrain
    from disttrain.fsdp2 import fully_shard

    disttrain.init_process_group(timeout=240)
    model = fully_shard(torch.nn.Linear(4, 4))
    for step in range(3):
        if step == 2 and disttrain.get_rank() == 1:
            sys.stdout.flush()
            os._exit(int(sys.argv[1]))
        model(torch.ones(2, 4)).sum().backward()
"""


def test_ranks_that_lose_another_in_a_forward_warn_of_nothing(forked_launches: Launches) -> None:
    ended = forked_launches.run("--nproc-per-node", "3", forked_launches.script(SHARDED), "7")
    assert ended.exit_code == 7
    assert "ranks 0, 2: stopped because rank 1 failed: exit code 7" in ended.stderr
    assert "Warning" not in ended.stderr
    assert not [line for line in told(ended) if line.startswith("[rank")]


def test_a_rank_that_left_too_early_with_0_is_named(forked_launches: Launches) -> None:
    ended = forked_launches.run("--nproc-per-node", "3", forked_launches.script(SHARDED), "0")
    assert ended.exit_code == 1
    assert "\n    rank 1 had ended before, with exit code 0, and may have been waited for.\n" in ended.stderr


def test_the_dumps_of_a_node_whose_ranks_left_too_early_come(forked_launches: Launches, port: int) -> None:
    script = forked_launches.script(SHARDED)
    flags = ["--nnodes", "2", "--master-port", str(port)]
    started = [forked_launches.start(*flags, "--node-rank", str(node), script, "0") for node in range(2)]
    first, second = [forked_launches.end(node) for node in started]
    assert (first.exit_code, second.exit_code) == (1, 1)
    assert "flight recorder: Rank 1 did not come to all_gather_into_tensor" in first.stderr
    assert len(told(second)) == 1


def test_verbose_shows_all_of_them(forked_launches: Launches) -> None:
    script = forked_launches.script(FAILING)
    ended = forked_launches.run("--verbose", "--nproc-per-node", "2", script, "raise", "1")
    assert "[rank 0] Traceback (most recent call last):" in told(ended)
    assert "[rank 1] Traceback (most recent call last):" in told(ended)


def test_what_is_folded_is_in_the_logs(forked_launches: Launches) -> None:
    script = forked_launches.script(FAILING)
    ended = forked_launches.run("--nproc-per-node", "2", "--log-dir", "logs", script, "raise", "1")
    folded = [line for line in told(ended) if "lines that they said of it are in" in line]
    logs = forked_launches.folder / "logs"
    assert [line.rpartition(" ")[2] for line in folded] == [str(logs / "rank-*" / "stderr.log")]
    assert "Traceback (most recent call last):" in (logs / "rank-0" / "stderr.log").read_text()
    assert "bad batch" in (logs / "rank-1" / "stderr.log").read_text()


def test_streams_that_only_go_to_files_have_a_verdict_on_the_screen(forked_launches: Launches) -> None:
    script = forked_launches.script(FAILING)
    flags = ("--log-dir", "logs", "--redirects", "3")
    ended = forked_launches.run("--nproc-per-node", "2", *flags, script, "raise", "1")
    assert "rank 0: stopped because rank 1 failed: ValueError: bad batch 1.0" in ended.stderr
    assert "    ValueError: bad batch 1.0" in told(ended)


def test_two_culprits_are_both_shown(forked_launches: Launches) -> None:
    ended = forked_launches.run("--nproc-per-node", "3", forked_launches.script(FAILING), "raise", "0,2")
    assert "rank 1: stopped because rank" in ended.stderr
    assert re.search(r"rank [02]: failed as well: ValueError: bad batch [02]\.0", ended.stderr), ended.stderr
    for rank in (0, 2):
        assert f"ValueError: bad batch {rank}.0" in ended.stderr
    assert ended.stderr.count('File "script.py", line 6, in load_batch') == 2


@pytest.mark.parametrize("culprit", [0, 3])
def test_wherever_the_culprit_is_all_nodes_dumps_tell_of_it(forked_launches: Launches, port: int, culprit: int) -> None:
    script = forked_launches.script(FAILING)
    first, second = nodes(forked_launches, port, script, "raise", str(culprit))
    assert (first.exit_code, second.exit_code) == (1, 1)
    reason = f"stopped because rank {culprit} failed: ValueError: bad batch {culprit}.0"
    others = [rank for rank in range(4) if rank != culprit]
    for node, ranks in ((first, (0, 1)), (second, (2, 3))):
        own = [rank for rank in others if rank in ranks]
        assert f"{'ranks' if len(own) > 1 else 'rank'} {', '.join(map(str, own))}: {reason}" in node.stderr
    assert first.stderr.count(f"    ValueError: bad batch {culprit}.0") == 1
    assert f"flight recorder: Rank {culprit} did not come to all_reduce #2 of group world" in first.stderr
    assert "ValueError (bad batch" in first.stderr
    assert "only; the dumps" not in first.stderr + second.stderr
    assert "flight recorder" not in second.stderr
    (kept,) = (forked_launches.folder).glob("disttrain-flight-*/*")
    assert sorted(file.name[:10] for file in kept.glob("*.flight")) == [f"rank-{rank:05d}" for rank in range(4)]


def test_of_each_attempt_there_is_one_verdict(forked_launches: Launches) -> None:
    script = forked_launches.script(FAILING)
    ended = forked_launches.run("--nproc-per-node", "2", "--max-restarts", "2", script, "raise", "1")
    for attempt in range(3):
        assert ended.stderr.count(f"    ValueError: bad batch 1.{attempt}\n") == 1, ended.stderr
        assert ended.stderr.count(f"it ended with ValueError (bad batch 1.{attempt})") == 1, ended.stderr
    assert ended.stderr.count("rank 0: stopped because rank 1 failed") == 3


KEPT = """
    import sys, threading, torch
    import disttrain

    disttrain.init_process_group(timeout=600)
    rank = disttrain.get_rank()
    disttrain.all_reduce(torch.ones(4))
    if rank == 1:
        threading.Thread(target=threading.Event().wait, name="uploads").start()
        if sys.argv[1] == "raise":
            raise ValueError("bad batch 17")
        sys.exit(int(sys.argv[1]))
    disttrain.all_reduce(torch.ones(4))
"""


def test_a_rank_that_fails_while_a_thread_keeps_its_process_is_to_blame_within_seconds(
    forked_launches: Launches,
) -> None:
    """Python waits for such a thread before it ends, here for ever."""
    ended = forked_launches.run("--nproc-per-node", "3", forked_launches.script(KEPT), "raise")
    assert "has waited for" not in ended.stderr, "it is the watchdog that has found it out"
    assert ended.exit_code == 1
    lines = told(ended)
    assert "disttrain-launch: ranks 0, 2: stopped because rank 1 failed: ValueError: bad batch 17" in lines
    assert "    ValueError: bad batch 17" in lines
    assert any("rank 1 failed first: exit code 1 after" in line for line in lines)
    kept = "the script of rank 1 has failed (ValueError), but threads that are no daemons keep its process: uploads"
    assert f"    {kept}" in lines
    assert "flight recorder: Rank 1 did not come to all_reduce #2" in ended.stderr


def test_a_rank_whose_script_has_ended_but_not_its_threads_is_named(forked_launches: Launches) -> None:
    script = forked_launches.script(KEPT)
    process = forked_launches.start("--nproc-per-node", "2", script, "3", DISTTRAIN_FLIGHT_SOFT_LIMIT_S="4")
    assert process.stderr is not None
    line = ""
    while "from the dumps" not in line:
        line = process.stderr.readline()
        assert line, "the job has ended"
        if "the script of rank 1" in line:
            assert line.endswith("has ended, but threads that are no daemons keep its process: uploads\n")
    assert line.endswith("its script has come to its end, but threads that are no daemons keep its process.\n")
    process.send_signal(signal.SIGTERM)
    forked_launches.end(process)


ABORTING = """
    import os, sys, time, traceback

    if os.environ["RANK"] == "0":
        if sys.argv[1] == "raised":
            print("step 3", file=sys.stderr)
            import atexit
            atexit.register(time.sleep, float(sys.argv[2]))
            raise ValueError("bad batch 17")
        time.sleep(60)
    time.sleep(1.0)
    os.abort()
"""


@pytest.mark.parametrize("slow_s", ["2.5", "60"])
def test_who_aborts_since_another_has_raised_has_not_failed_first(launches: Launches, slow_s: str) -> None:
    """NCCL's watchdog ends its process when it has lost a rank, which lets go of its GPU for longer than that takes."""
    ended = launches.run("--nproc-per-node", "2", launches.script(ABORTING), "raised", slow_s)
    assert ended.exit_code == 1
    assert "rank 0 failed first: exit code 1" in ended.stderr
    assert "disttrain-launch: rank 1: failed as well: Fatal Python error: Aborted" in told(ended)
    assert "rank 1 failed" not in ended.stderr


def test_who_aborts_when_nobody_has_raised_has_failed_first(launches: Launches) -> None:
    ended = launches.run("--nproc-per-node", "2", launches.script(ABORTING), "waiting")
    assert ended.exit_code == 128 + signal.SIGABRT
    assert "rank 1 failed first: killed by SIGABRT" in ended.stderr


LOST_THREAD = """
    import sys, queue, threading, torch
    import disttrain

    def load_batches(batches):
        raise ValueError("bad batch 17")

    disttrain.init_process_group(timeout=240)
    rank, batches = disttrain.get_rank(), queue.Queue()
    group = disttrain.new_group(timeout=5)
    disttrain.all_reduce(torch.ones(4), group=group)
    if rank == 1:
        is_daemon = sys.argv[1] == "daemon"
        threading.Thread(target=load_batches, args=(batches,), name="loader", daemon=is_daemon).start()
        batches.get()
    disttrain.all_reduce(torch.ones(4), group=group)
"""


@pytest.mark.parametrize("kind", ["daemon", "not a daemon"])
def test_a_rank_that_waits_for_a_thread_that_has_failed_is_to_blame_with_that_threads_words(
    forked_launches: Launches, kind: str
) -> None:
    ended = forked_launches.run("--nproc-per-node", "3", forked_launches.script(LOST_THREAD), kind)
    assert ended.exit_code == 1
    lines = told(ended)
    assert "disttrain-launch: ranks 0, 2: stopped because rank 1 failed: ValueError: bad batch 17" in lines
    last = lines.index("disttrain-launch: the last lines on stderr of rank 1:")
    assert lines[last + 1 : last + 3] == ["    Exception in thread loader:", "    Traceback (most recent call last):"]
    assert "    ValueError: bad batch 17" in lines[last:]
    verdict = next(line for line in lines if line.startswith("disttrain-launch: flight recorder: "))
    assert "Rank 1 did not come to all_reduce #2" in verdict
    assert "; its thread loader has failed (ValueError: bad batch 17) at " in verdict
    assert verdict.endswith("script.py:6 in load_batches.")
