"""What somebody sees of a job: folded lines, a table on a terminal, its status from elsewhere, its event log."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.surroundings.terminal import Terminal

if TYPE_CHECKING:
    from tests.multirank.launch.conftest import Launches

FOLDS = {"DISTTRAIN_LAUNCH_NO_FOLD": ""}
REPORTING = """
    import os, time, disttrain
    rank = int(os.environ["RANK"])
    disttrain.report(step=7, loss=1.5 + rank, tokens_per_s=1000)
    print("ready")
    until = time.monotonic() + 240
    while not os.path.exists("over") and time.monotonic() < until:
        time.sleep(0.05)
"""


def events(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_what_all_ranks_say_is_said_once(launches: Launches) -> None:
    script = launches.script("""
        import os, sys, time
        rank = int(os.environ["RANK"])
        open(f"here {rank}", "w").close()
        while not all(os.path.exists(f"here {other}") for other in range(3)):
            time.sleep(0.001)
        print("all are here")
        time.sleep(0.5)
        if rank == 1:
            for _ in range(5):
                print("again")
            print("enough")
    """)
    ended = launches.run("--nproc-per-node", "3", "--log-dir", "logs", script, **FOLDS)
    assert ended.lines == [
        "[ranks 0-2] all are here",
        "[rank 1] again",
        "[rank 1] (repeated 4 times)",
        "[rank 1] enough",
    ]
    kept = (launches.folder / "logs" / "rank-1" / "stdout.log").read_text()
    assert kept == "all are here\n" + 5 * "again\n" + "enough\n"
    plain = launches.run("--nproc-per-node", "3", "--no-fold", script)
    assert sorted(plain.lines) == sorted(
        [f"[rank {rank}] all are here" for rank in range(3)] + 5 * ["[rank 1] again"] + ["[rank 1] enough"]
    )


def test_what_is_said_again_at_the_end_is_told(launches: Launches) -> None:
    script = launches.script("""
        for text in ["begin", *["same"] * 5]:
            print(text)
    """)
    ended = launches.run("--nproc-per-node", "1", script, **FOLDS)
    assert ended.lines == ["[rank 0] begin", "[rank 0] same", "[rank 0] (repeated 4 times)"]


@pytest.mark.parametrize("num_lines", [1500, 5000])
def test_a_terminal_that_nobody_reads_keeps_no_launcher_that_is_told_to_stop(
    launches: Launches, num_lines: int
) -> None:
    script = launches.script("""
        import sys
        for number in range(int(sys.argv[1])):
            print(number, "x" * 100)
    """)
    reading, writing = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "disttrain_launch",
        "--nproc-per-node",
        "1",
        "--log-dir",
        "logs",
        script,
        str(num_lines),
    ]
    process = subprocess.Popen(
        command,
        cwd=launches.folder,
        env=launches.environ(),
        stdin=subprocess.DEVNULL,
        stdout=writing,
        stderr=writing,
        start_new_session=True,
    )
    launches.started.append(process)
    log = launches.folder / "logs" / "rank-0" / "stdout.log"
    while not log.exists() or log.stat().st_size < 150_000:
        time.sleep(0.05)
    # What was printed waits for who reads it.
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(80.0) == 128 + signal.SIGTERM
    os.close(reading)
    os.close(writing)


def test_the_event_log_tells_the_whole_story(launches: Launches) -> None:
    script = launches.script("""
        import os, sys
        if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            print("password", file=sys.stderr)
            sys.exit(3)
    """)
    ended = launches.run("--nproc-per-node", "2", "--max-restarts", "1", "--log-dir", "logs", script, "--key=password")
    assert ended.exit_code == 0
    file = launches.folder / "logs" / "events.jsonl"
    found = events(file)
    assert "password" not in file.read_text()
    assert all(one["time"].endswith("Z") for one in found)
    names = [one["event"] for one in found]
    assert names[:3] == ["job_started", "node_joined", "round_formed"]
    assert names[-2:] == ["node_left", "job_ended"]
    assert [one["event"] for one in found if one["event"] in ("stop", "restart", "round_formed")] == [
        "round_formed",
        "stop",
        "restart",
        "round_formed",
    ]
    assert [(one["round"], one["rank"]) for one in found if one["event"] == "worker_started"] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    exits = [one for one in found if one["event"] == "worker_exited"]
    assert sorted((one["round"], one["rank"], one.get("exit_code")) for one in exits if one["rank"] == 1) == [
        (0, 1, 3),
        (1, 1, 0),
    ]
    (stop,) = [one for one in found if one["event"] == "stop"]
    assert (stop["cause"]["kind"], stop["cause"]["rank"], stop["cause"]["exit_code"]) == ("worker failed", 1, 3)
    assert (found[-1]["exit_code"], found[-1]["cause"]) == (0, {"kind": "success"})


@pytest.mark.parametrize("is_json", [True, False])
def test_status_finds_the_jobs_of_this_machine(launches: Launches, is_json: bool) -> None:
    process = launches.start("--nproc-per-node", "2", "--rdzv-id", "job-7", launches.script(REPORTING))
    launches.ready(process, 1)
    ended = launches.run("status")
    for _ in range(200):
        if "2.00k" in ended.stdout:  # Both workers have told.
            break
        ended = launches.run("status")
    assert ended.lines[0].startswith("job job-7: running, 1 node, 2 workers, 0:")
    assert ended.lines[-1].split() == ["all", "7", "2", "2.00k"]
    if is_json:
        (job,) = [json.loads(line) for line in launches.run("status", "--json").lines]
        assert [each["numbers"] for each in job["nodes"][0]["workers"]] == [
            {"step": 7, "loss": 1.5 + rank, "tokens_per_s": 1000} for rank in range(2)
        ]
    # A launcher that was killed with its warden: another has its port now, or nobody has.
    (note,) = launches.folder.glob("disttrain-*/job.json")
    found = json.loads(note.read_text())
    for name, endpoint in (("disttrain-0", found["endpoint"]), ("disttrain-1", "127.0.0.1:1")):
        (launches.folder / name).mkdir()
        stale = {"endpoint": endpoint, "token_file": str(launches.folder / "gone")}
        (launches.folder / name / "job.json").write_text(json.dumps(stale))
    assert launches.run("status").lines[0].startswith("job job-7: running")
    for name in ("disttrain-0", "disttrain-1"):
        shutil.rmtree(launches.folder / name)
    (launches.folder / "over").touch()
    assert launches.end(process).exit_code == 0
    none = launches.run("status")
    assert (none.exit_code, none.stdout) == (3, "")
    assert none.stderr == "disttrain-launch status: there is no running job of this user on this machine.\n"


def test_status_by_its_address_needs_the_token(launches: Launches, port: int) -> None:
    launches.run("--new-token", "token")
    launches.run("--new-token", "other")
    script = launches.script(REPORTING)
    job = ["--nnodes", "2", "--master-port", str(port), "--token-file", "token", "--nproc-per-node", "2"]
    nodes = [launches.start(*job, "--node-rank", str(rank), "--event-log", "events", script) for rank in range(2)]
    for node in nodes:
        launches.ready(node, 1)
    asked = ("status", "--endpoint", f"127.0.0.1:{port}", "--token-file")
    ended = launches.run(*asked, "token")
    for _ in range(200):
        if "4.00k" in ended.stdout:  # Both nodes have told.
            break
        ended = launches.run(*asked, "token")
    title, head, *rows, total = ended.lines
    assert ": running, 2 nodes, 4 workers, 0:" in title
    assert head.split() == ["node", "host", "workers", "step", "loss", "tokens/s", "state"]
    assert [row.split()[0] for row in rows] == ["0", "1"]
    assert total.split()[:3] == ["all", "7", "3"]
    refused = launches.run(*asked, "other")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "token" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    (launches.folder / "over").touch()
    assert [launches.end(node).exit_code for node in nodes] == [0, 0]
    found = events(launches.folder / "events")
    for name in ("worker_started", "worker_exited"):
        assert sorted(one["rank"] for one in found if one["event"] == name) == [0, 1, 2, 3]
    assert [one["event"] for one in found if one["event"].startswith("job")] == ["job_started", "job_ended"]
    gone = launches.run(*asked, "token")
    assert (gone.exit_code, gone.stderr) == (
        3,
        f"disttrain-launch status: there is no running job at 127.0.0.1:{port}.\n",
    )


def test_a_wrong_endpoint_is_one_line(launches: Launches) -> None:
    ended = launches.run("status", "--endpoint", "node0")
    assert (ended.exit_code, ended.stderr) == (2, "disttrain-launch status: --endpoint node0 is not HOST:PORT.\n")


def on_a_terminal(launches: Launches, *argv: str, until: str) -> tuple[int, Terminal, str]:
    """Run it in a terminal of 80 x 24; once `until` has been shown the workers may end. Returns: exit code, the
    terminal, and all that was written."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "disttrain_launch", *argv]
    environ = {**launches.environ(), **FOLDS, "TERM": "xterm"}
    process = subprocess.Popen(
        command, cwd=launches.folder, env=environ, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    written = b""
    try:
        while part := os.read(ours, 65536):
            written += part
            if until.encode() in written:
                (launches.folder / "over").touch()
    except OSError:
        pass  # Linux says so when the other end is closed.
    os.close(ours)
    terminal = Terminal(80, 24)
    terminal.feed(written)
    return process.wait(240), terminal, written.decode()


def test_on_a_terminal_a_table_is_shown_and_removed(launches: Launches) -> None:
    pytest.importorskip("rich")
    script = launches.script(REPORTING + "    print('bye')\n")
    exit_code, terminal, written = on_a_terminal(launches, "--nproc-per-node", "2", script, until="tokens/s")
    assert exit_code == 0
    assert "running, 1 node, 2 workers" in written
    shown = [line.split("] ")[1] for line in terminal.shown()]
    assert [word for word, _ in groupby(shown)] == ["ready", "bye"], "alike lines that come together are one"
    assert len(shown) <= 4


def test_a_quiet_launcher_says_only_why_it_failed(launches: Launches) -> None:
    script = launches.script("""
        import os, sys, time
        time.sleep(2.5)
        sys.exit(int(os.environ["RANK"]))
    """)
    _, terminal, written = on_a_terminal(launches, "-q", "--nproc-per-node", "2", script, until="never")
    assert terminal.shown()[0].startswith("disttrain-launch: rank 1 failed first: exit code 1")
    assert len(written.splitlines()) == 1
