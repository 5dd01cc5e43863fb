"""The command from outside: what workers see, what the screen shows, which code comes back."""

from __future__ import annotations

import json
import os
import pty
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.surroundings.launching import launcher

if TYPE_CHECKING:
    from tests.multirank.launch.conftest import Launches


def test_workers_get_their_numbers_and_arguments(launches: Launches) -> None:
    script = launches.script("""
        import json, os, sys
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"]
        print(json.dumps([[os.environ[name] for name in names], sys.argv]))
    """)
    ended = launches.run("--standalone", "--nproc-per-node", "3", script, "--lr", "0.1")
    assert (ended.exit_code, ended.stderr) == (0, "")
    seen = {line[: len("[rank 0]")]: json.loads(line[len("[rank 0] ") :]) for line in ended.lines}
    num_threads = str(max(1, len(os.sched_getaffinity(0)) // 3))
    assert seen == {
        f"[rank {rank}]": [[str(rank), str(rank), "3", "3", "127.0.0.1", num_threads], [script, "--lr", "0.1"]]
        for rank in range(3)
    }


def test_workers_reach_the_store_with_their_token(launches: Launches) -> None:
    script = launches.script("""
        import os, stat
        from disttrain.store import TCPStore
        host, port = os.environ["DISTTRAIN_STORE"].rsplit(":", 1)
        store = TCPStore(host, int(port), timeout=120)
        store.barrier("all here", 2)
        mode = os.stat(os.environ["DISTTRAIN_TOKEN_FILE"]).st_mode
        token = open(os.environ["DISTTRAIN_TOKEN_FILE"]).read().strip()
        in_sight = open("/proc/self/environ").read() + open("/proc/self/cmdline").read()
        print(store.add("sum", 1) > 0, oct(stat.S_IMODE(mode)), token in in_sight)
        store.close()
    """)
    ended = launches.run("--nproc-per-node", "2", script)
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert sorted(ended.lines) == ["[rank 0] True 0o600 False", "[rank 1] True 0o600 False"]


def test_modules_programs_and_packages_run_too(launches: Launches) -> None:
    launches.script("import sys; print('module', sys.argv[1:])", "module.py")
    assert launches.run("-m", "module", "a").lines == ["[rank 0] module ['a']"]
    assert launches.run("--no-python", "sh", "-c", "echo program $RANK").lines == ["[rank 0] program 0"]
    assert launches.run("--no_python", "./missing").exit_code == 2


@pytest.mark.parametrize(
    ("code", "exit_code", "words"),
    [
        ("sys.exit(7)", 7, "rank 1 failed first: exit code 7"),
        ("raise KeyError('where')", 1, "    KeyError: 'where'\ndisttrain-launch: rank 1 failed first: exit code 1"),
        ("os.kill(os.getpid(), 11)", 139, "rank 1 failed first: killed by SIGSEGV"),
        ("os.abort()", 134, "rank 1 failed first: killed by SIGABRT"),
    ],
)
def test_the_first_failure_is_reported_last_and_its_code_is_ours(
    launches: Launches, code: str, exit_code: int, words: str
) -> None:
    script = launches.script(f"""
        import os, sys, time
        if os.environ["RANK"] == "1":
            {code}
        time.sleep(100)
    """)
    ended = launches.run("--nproc-per-node", "3", script)
    assert ended.exit_code == exit_code
    report = ended.stderr[ended.stderr.index("worker") :]
    assert words in report
    assert "[rank" not in report


def test_lines_are_never_torn_or_mixed(launches: Launches) -> None:
    script = launches.script("""
        import os, random, sys
        rank = int(os.environ["RANK"])
        lines = "".join(f"{rank} {number} {'x' * (number % 300)} end\\n" for number in range(4000)).encode()
        at = 0
        draw = random.Random(rank)
        while at < len(lines):
            at += os.write(1 + rank % 2, lines[at : at + draw.randint(1, 5000)])
    """)
    process = subprocess.run(
        [sys.executable, "-m", "disttrain_launch", "--nproc-per-node", "4", script],
        cwd=launches.folder,
        env=launches.environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        timeout=240,
    )
    lines = process.stdout.splitlines()
    for rank in range(4):
        mine = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert mine == [f"[rank {rank}] {rank} {number} {'x' * (number % 300)} end" for number in range(4000)]
    assert len(lines) == 4 * 4000


def test_logs_of_every_rank_are_kept(launches: Launches) -> None:
    script = launches.script("""
        import os, sys
        print("out", os.environ["RANK"])
        print("err", os.environ["RANK"], file=sys.stderr, end="")
    """)
    ended = launches.run(
        "--nproc-per-node", "2", "--log-dir", "logs", "-r", "0:1,1:2", "--local-ranks-filter", "1", script
    )
    files = {
        path.relative_to(launches.folder).as_posix(): path.read_text() for path in launches.folder.glob("logs/**/*.log")
    }
    assert (ended.exit_code, ended.stdout, ended.stderr) == (0, "[rank 1] out 1\n", "")
    assert files == {"logs/rank-0/stdout.log": "out 0\n", "logs/rank-1/stderr.log": "err 1"}
    everything = launches.run("--nproc-per-node", "2", "--log-dir", "all", script)
    assert sorted(everything.lines) == ["[rank 0] out 0", "[rank 1] out 1"]
    assert sorted(everything.stderr.splitlines()) == ["[rank 0] err 0", "[rank 1] err 1"]
    assert len(list(launches.folder.glob("all/rank-?/std*.log"))) == 4


def test_on_a_terminal_prefixes_have_colours_and_a_bar_stays_below(launches: Launches) -> None:
    script = launches.script(r"""
        import sys
        for percent in (10, 60):
            sys.stderr.write(f"\r{percent}%")
        sys.stderr.write("\n")
    """)
    ours, terminal = pty.openpty()
    command = [sys.executable, "-m", "disttrain_launch", script]
    process = subprocess.Popen(
        command, cwd=launches.folder, env=launches.environ(), stdin=terminal, stdout=terminal, stderr=terminal
    )
    os.close(terminal)
    assert process.wait(240) == 0
    shown = os.read(ours, 65536)
    os.close(ours)
    assert shown.endswith(b"\r\x1b[2K\x1b[36m[rank 0]\x1b[0m 60%\r\n") or shown == b"\x1b[36m[rank 0]\x1b[0m 60%\r\n"


def test_a_reader_that_went_away_does_not_end_the_job(launches: Launches) -> None:
    script = launches.script("""
        for number in range(200_000):
            print(number)
        open("finished", "w").close()
    """)
    process = launches.start(script)
    assert process.stdout is not None
    assert process.stdout.readline() == "[rank 0] 0\n"
    process.stdout.close()
    process.stdout = None
    assert launches.end(process).exit_code == 0
    assert (launches.folder / "finished").exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("missing.py", "the script missing.py does not exist."),
        ("--nproc-per-node 0 script.py", "--nproc-per-node 0 starts nothing."),
        ("--nnodes 2 --node-rank 0 --master-addr 192.0.2.1 script.py", "and the job has no token."),
        ("--no-such-flag script.py", "unrecognized arguments: --no-such-flag"),
        ("--token-file script.py script.py", "script.py has mode 0644"),
    ],
)
def test_wrong_input_is_one_line(launches: Launches, argv: str, words: str) -> None:
    launches.script("print('started')")
    ended = launches.run(*argv.split())
    assert (ended.exit_code, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("disttrain-launch: ")
    assert words in line


def test_a_port_in_use_is_named(launches: Launches) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        ended = launches.run("--master-port", str(port), launches.script("print('started')"))
    assert (ended.exit_code, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"disttrain-launch: the store cannot listen on 127.0.0.1:{port}: ")


def test_a_limit_of_the_machine_is_named(launches: Launches) -> None:
    script = launches.script("print('started')")
    line = f"ulimit -n 14; exec {sys.executable} -m disttrain_launch --nproc-per-node 4 {script}"
    ended = launches.run("--no-python", "sh", "-c", line)
    assert ended.exit_code == 2
    assert ended.lines == []
    assert ended.stderr.splitlines()[0] == (
        "[rank 0] disttrain-launch: a limit of this machine: Too many open files. "
        "Raise ulimit -n, or start fewer workers."
    )


def test_a_new_token_is_ours_alone(launches: Launches) -> None:
    ended = launches.run("--new-token", "token")
    assert ended.exit_code == 0
    assert stat.S_IMODE((launches.folder / "token").stat().st_mode) == 0o600
    again = launches.run("--new-token", "token")
    assert (again.exit_code, len(again.stderr.splitlines())) == (2, 1)
    assert "token exists already" in again.stderr


def test_the_arguments_of_a_launcher_inside_a_worker_are_its_own(launches: Launches) -> None:
    script = launches.script("import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'])")
    command = [sys.executable, "-m", "disttrain_launch", "--nproc-per-node", "2", script]
    ended = launches.run("--no-python", *command)
    assert sorted(ended.lines) == ["[rank 0] [rank 0] 0 2", "[rank 0] [rank 1] 1 2"]
    assert (ended.exit_code, ended.stderr) == (0, "")


def test_closed_standard_streams_get_nobodys_output(launches: Launches) -> None:
    script = launches.script("import os; open('ran' + os.environ['RANK'], 'w').close(); print('hello')")
    line = f"exec {sys.executable} -m disttrain_launch --nproc-per-node 2 {script} <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", line], cwd=launches.folder, env=launches.environ(), check=False).returncode == 0
    assert sorted(path.name for path in Path(launches.folder).glob("ran?")) == ["ran0", "ran1"]


@pytest.fixture
def without_a_network() -> list[str]:
    """Begins a command that runs so."""
    unshare = ["unshare", "--net", *(() if os.geteuid() == 0 else ("--user", "--map-root-user"))]
    if subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine lets nobody make namespaces")
    return unshare


@pytest.mark.parametrize(
    "flags", [["--standalone"], ["--nnodes", "2", "--node-rank", "0"], ["--nnodes", "2", "--node-rank", "1"]]
)
def test_where_there_is_not_even_a_loopback_interface_the_command_says_so_at_once(
    launches: Launches, without_a_network: list[str], flags: list[str]
) -> None:
    argv = [*without_a_network, *launcher(), *flags, launches.script("print('ran')")]
    environ = launches.environ()
    ended = subprocess.run(argv, env=environ, cwd=launches.folder, check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, len(ended.stderr.splitlines())) == (2, "", 1)
    assert "127.0.0.1: this machine's loopback interface is down. Bring it up" in ended.stderr


def test_a_rank_without_a_loopback_interface_does_not_dial_on(launches: Launches, without_a_network: list[str]) -> None:
    text = "from disttrain.store import TCPStore; TCPStore('127.0.0.1', 9, is_master=False, timeout=30)"
    argv = [*without_a_network, sys.executable, "-c", text]
    ended = subprocess.run(argv, env=launches.environ(), check=False, capture_output=True, text=True, timeout=15)
    assert "StoreConnectionError: connect: this machine's loopback interface is down" in ended.stderr


def test_output_that_cannot_be_written_is_said_once(launches: Launches) -> None:
    script = launches.script('print("first", flush=True)\nprint("second", flush=True)')
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "disttrain_launch", "--nproc-per-node", "2", script],
            cwd=launches.folder,
            env=launches.environ(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=240,
            check=True,
        )
    said = "disttrain-launch: standard output is not written any more: No space left on device.\n"
    assert ended.stderr == said


def test_a_child_of_a_rank_that_ends_ends_nothing_else(launches: Launches) -> None:
    """By sys.exit, whose ending says goodbye to nobody, and does not wait for threads that the rank has."""
    script = launches.script(
        """
        import os, sys, torch, disttrain
        disttrain.init_process_group()
        disttrain.all_reduce(torch.ones(1))
        if not os.fork():
            sys.exit(5)
        print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
        total = torch.ones(1)
        disttrain.all_reduce(total, group=disttrain.new_group())
        print("sum", int(total), flush=True)
        """
    )
    ended = launches.run("--nproc-per-node", "2", script)
    assert ended.exit_code == 0, ended.stderr
    assert sorted(line.split("] ")[-1] for line in ended.stdout.splitlines()) == ["5", "5", "sum 2", "sum 2"]
