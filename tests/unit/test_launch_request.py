"""The command line: torchrun's flags mean what they mean there, and whatever cannot be done is refused in one line."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from disttrain.devices import num_cores
from disttrain.errors import LaunchError
from disttrain_launch.cli import main
from disttrain_launch.output.failure.report import ending
from disttrain_launch.rendezvous.messages import Run
from disttrain_launch.rendezvous.rounds import Assignment, Terms
from disttrain_launch.request.flags import misplaced, parse
from disttrain_launch.request.job import STDERR, STDOUT, JobSpec, LogPlan, parse_stream_choice
from disttrain_launch.request.request import job_spec
from disttrain_launch.workers.environment import Meeting, worker_environment
from disttrain_launch.workers.outcome import Failed, Interrupted, Lost, Succeeded

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('hello')\n")
    return "train.py"


def spec_of(*argv: str) -> JobSpec:
    return job_spec(parse(argv), NO_GPU)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("dctor", "dctor is neither a command nor a script that there is. Did you mean doctor?"),
        ("submt slurm train.py", "Did you mean submit?"),
        ("runs", "the script runs is a folder"),
        ("run.py", "the script run.py does not exist"),
        ("trainer", "the script trainer does not exist"),
    ],
)
def test_a_command_that_was_misspelt(line: str, said: str, script: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs").mkdir()
    assert main(line.split()) == 2
    assert said in capsys.readouterr().err


def test_the_plain_case(script: str) -> None:
    spec = spec_of("--nproc-per-node", "2", script, "--steps", "3", "--", "-x")
    assert spec.command == (sys.executable, "-u", "train.py", "--steps", "3", "--", "-x")
    assert (spec.num_local_workers, spec.num_nodes, spec.node_rank) == (2, 1, 0)
    assert (spec.master_addr, spec.master_port) == ("127.0.0.1", 0)
    assert (spec.stop_grace_s, spec.shutdown_timeout_s) == (2.0, 30.0)


def test_both_spellings_mean_the_same(script: str) -> None:
    dashes = spec_of("--nproc-per-node=2", "--nnodes=2", "--node-rank=1", "--master-port=1234", "--rdzv-id=a", script)
    underscores = spec_of(
        "--nproc_per_node", "2", "--nnodes", "2:2", "--node_rank=1", "--master_port=1234", "--rdzv_id=a", script
    )
    assert dashes == underscores


def test_an_endpoint_is_address_and_port(script: str) -> None:
    spec = spec_of(
        "--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "[::1]:1234", "--rdzv-backend", "c10d", script
    )
    assert (spec.master_addr, spec.master_port) == ("::1", 1234)


def test_a_range_of_nodes_and_what_torchrun_sets_by_rdzv_conf(script: str) -> None:
    conf = "last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=3,join_timeout=60"
    argv = ("--nnodes=2:4", "--max-restarts=3", "--rdzv-endpoint=localhost:1234", f"--rdzv_conf={conf}", script)
    spec = spec_of(*argv)
    assert (spec.node_rank, spec.num_nodes, spec.min_nodes) == (None, 4, 2)
    assert spec.terms == Terms(2, 4, 3, join_timeout_s=60.0, last_call_s=5.0, keep_alive_s=6.0)
    assert spec_of("--join-timeout=7", *argv).terms.join_timeout_s == 7.0
    assert spec_of("--node-rank=9", *argv).node_rank == 9


def test_flags_of_torchrun_that_ask_for_what_is_done_anyhow(script: str) -> None:
    asked = "--start-method fork --event_log_handler null --logs-specs=default --signals-to-handle SIGTERM,SIGINT"
    asked += " --rdzv-conf read_timeout=60,use_libuv=1,join_timeout=300"
    spec = spec_of(*asked.split(), "--rdzv-id=a", script)
    assert spec == spec_of("--rdzv-id=a", "--join-timeout=300", script)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("{} --nproc-per-node 2", "--nproc-per-node stands behind {}, which gets it"),
        ("{} --nproc_per_node=2 --standalone", "--nproc-per-node, --standalone stand behind {}, which gets them"),
        ("--nproc-per-node 2 {} --nproc-per-node 4", ""),
        ("{} --steps 2 --master-port 5", ""),
    ],
)
def test_flags_behind_the_script_are_its_own_and_are_spoken_of(script: str, argv: str, said: str) -> None:
    args = parse(argv.format(script).split())
    assert misplaced(args).startswith(said.format(script)) if said else not misplaced(args)
    assert job_spec(args, {}).command[-1] == argv.rsplit(maxsplit=1)[-1]


def test_nodes_run_the_same_unless_all_are_told_otherwise(script: str) -> None:
    plain = [spec_of(script, "--lr", lr).digest for lr in ("1", "2", "1")]
    assert plain[0] == plain[2] != plain[1]
    told = [spec_of("--allow-different-commands", script, "--lr", lr).digest for lr in ("1", "2")]
    assert told[0] == told[1] != plain[0]


def test_modules_and_programs(script: str) -> None:
    assert spec_of("-m", "train", "a").command == (sys.executable, "-u", "-m", "train", "a")
    assert spec_of("-m", "json.tool").command == (sys.executable, "-u", "-m", "json.tool")
    assert spec_of("--no-python", "echo", "a").command == ("echo", "a")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("", "no script was given"),
        ("missing.py", "the script missing.py does not exist"),
        ("folder", "is a folder without a __main__.py"),
        ("-m no_such_module_anywhere", "there is no module no_such_module_anywhere"),
        ("--no-python no-such-program", "no-such-program is not a program that can be run"),
        ("--no-python -m train", "--module and --no-python conflict"),
        ("--nproc-per-node 0 train.py", "--nproc-per-node 0 starts nothing"),
        ("--nproc-per-node many train.py", "--nproc-per-node many starts nothing"),
        ("--nproc-per-node gpu train.py", "this node has no visible GPU"),
        ("--nnodes 0 train.py", "--nnodes 0: it must be a positive number"),
        ("--nnodes 4:1 train.py", "--nnodes 4:1: the first number is the larger. Give 1:4."),
        ("--nnodes 1: train.py", "--nnodes 1:: it must be a positive number, or two"),
        ("--rdzv-conf last_call=3 train.py", "--rdzv-conf last_call=3 is not known. It knows join_timeout"),
        ("--rdzv-conf last_call_timeout=x train.py", "--rdzv-conf last_call_timeout nan is not a time"),
        ("--rdzv-conf keep_alive_interval=0 train.py", "keep_alive_interval must be more than 0"),
        (
            "--rdzv-conf keep_alive_max_attempt=2 train.py",
            "=2 is not a number of beats that may be missed. Give a whole",
        ),
        ("--rdzv-conf keep_alive_max_attempt=3.5 train.py", "=3.5 is not a number of beats that may be missed."),
        ("--nnodes 2 train.py", "--nnodes 2 needs --node-rank"),
        ("--nnodes 2 --node-rank 2 train.py", "--node-rank 2 does not fit --nnodes 2"),
        ("--nnodes 2 --node-rank 0 --master-addr 192.0.2.1 train.py", "the job has no token"),
        ("--nnodes 2 --node-rank 0 --master-addr a..b train.py", "--master-addr 'a..b' is not a host"),
        (f"--master-addr {'a' * 64} train.py", "is not a host. Give node 0's host name or address."),
        ("--nnodes 2 --node-rank 0 --master-port 70000 train.py", "--master-port 70000 is not a port"),
        ("--rdzv-endpoint a:b:c train.py", "--rdzv-endpoint a:b:c is not HOST:PORT"),
        ("--rdzv-endpoint a:1 --master-port 2 train.py", "says the same as --master-addr and --master-port"),
        ("--standalone --nnodes 2 --master-port 1 train.py", "it conflicts with --nnodes, --master-port"),
        ("--max-restarts -1 train.py", "--max-restarts -1 is not a number of times"),
        ("--token-file missing train.py", "the token file missing does not exist"),
        ("--log-dir train.py/logs train.py", "train.py/logs cannot be written: Not a directory"),
        ("--tee 7 train.py", "--tee 7 is not a choice of streams"),
        ("--redirects 0:1,1 train.py", "--redirects 0:1,1 is not a choice of streams"),
        ("--local-ranks-filter a train.py", "--local-ranks-filter a is not a list of local ranks"),
        ("--stop-grace -1 train.py", "--stop-grace -1 is not a time"),
        ("--join-timeout nan train.py", "--join-timeout nan is not a time"),
    ],
)
def test_wrong_input_is_refused(script: str, argv: str, words: str) -> None:
    Path("folder").mkdir()
    with pytest.raises(LaunchError) as caught:
        spec_of(*argv.split())
    message = str(caught.value)
    assert words in message
    assert "\n" not in message


def test_a_working_directory_that_is_gone_is_named(script: str) -> None:
    Path("gone").mkdir()
    os.chdir("gone")
    Path("../gone").rmdir()
    with pytest.raises(LaunchError, match="the working directory cannot be used: No such file or directory"):
        spec_of(script)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--start_method=thread train.py", "torchrun's --start-method is not supported."),
        ("--signals-to-handle=SIGTERM,SIGQUIT train.py", "torchrun's --signals-to-handle is not supported."),
        ("--virtual-local-rank train.py", "torchrun's --virtual-local-rank is not supported."),
        ("--no-such-flag train.py", "unrecognized arguments: --no-such-flag"),
        ("--node-rank one train.py", "argument --node-rank/--node_rank: invalid int value: 'one'"),
    ],
)
def test_flags_we_do_not_have_are_refused(capsys: pytest.CaptureFixture[str], argv: str, words: str) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(argv.split())
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_more_workers_than_gpus_need_a_word(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disttrain_launch.request.request.num_gpus", lambda environ: 2)
    assert spec_of("--nproc-per-node", "auto", script).num_local_workers == 2
    assert spec_of("--nproc-per-node", "gpu", script).num_local_workers == 2
    assert spec_of("--nproc-per-node", "3", "--oversubscribe", script).num_local_workers == 3
    with pytest.raises(LaunchError, match="--nproc-per-node 3 is more than the 2 visible GPUs of this node"):
        spec_of("--nproc-per-node", "3", script)


def test_auto_and_cpu_count_cores_without_gpus(script: str) -> None:
    cores = len(os.sched_getaffinity(0))
    assert spec_of("--nproc-per-node", "auto", script).num_local_workers == cores
    assert spec_of("--nproc-per-node", "cpu", script).num_local_workers == cores


def test_streams_are_chosen_for_all_or_by_local_rank(tmp_path: Path) -> None:
    tee = LogPlan(tmp_path, file_and_screen=parse_stream_choice("0:3,1:2"))
    kept = [
        (local_rank, stream) for local_rank in (0, 1, 2) for stream in (STDOUT, STDERR) if tee.keeps(local_rank, stream)
    ]
    assert kept == [(0, STDOUT), (0, STDERR), (1, STDERR)]
    assert tee.shows(2, STDOUT)
    redirect = LogPlan(tmp_path, only_file=parse_stream_choice("3"), shown_local_ranks=frozenset({0}))
    assert redirect.keeps(5, STDOUT)
    assert not redirect.shows(0, STDOUT)
    everything = LogPlan(tmp_path, shown_local_ranks=frozenset({1}))
    assert everything.keeps(0, STDERR)
    assert (everything.shows(0, STDERR), everything.shows(1, STDERR)) == (False, True)
    assert not LogPlan().keeps(0, STDOUT)


def test_what_a_worker_finds_in_its_environment() -> None:
    spec = JobSpec(("train",), 2, num_nodes=3, node_rank=1, run_id="run", role="trainer", max_restarts=3)
    meeting = Meeting("::1", 29500, Path("/run/token"), "host-0")
    run = Run(Assignment(4, 1, 2, 3, 6), 2, 40000)
    environ = worker_environment({"PATH": "/bin"}, spec, run, meeting, "agent", 1)
    assert environ == {
        "PATH": "/bin",
        "RANK": "3",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "ROLE_RANK": "3",
        "ROLE_NAME": "trainer",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_WORLD_SIZE": "6",
        "MASTER_ADDR": "host-0",
        "MASTER_PORT": "40000",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "run",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": "1",
        "DISTTRAIN_STORE": "[::1]:29500",
        "DISTTRAIN_TOKEN_FILE": "/run/token",
        "DISTTRAIN_ROUND": "4",
        "DISTTRAIN_AGENT": "agent",
    }


def test_workers_share_the_cores(script: str) -> None:
    cores = num_cores()
    assert spec_of("--nproc-per-node", "1", script).num_threads == cores
    assert spec_of("--nproc-per-node", str(2 * cores), script).num_threads == 1
    run = Run(Assignment(0, 0, 0, 1, 2), 0, 2)
    meeting = Meeting("127.0.0.1", 1, None, "127.0.0.1")
    environ = worker_environment({}, JobSpec(("train",), 2, num_threads=7), run, meeting, "agent", 0)
    assert environ["OMP_NUM_THREADS"] == "7"


def test_what_the_user_set_stays() -> None:
    inherited = {"OMP_NUM_THREADS": "4", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "DISTTRAIN_TOKEN_FILE": "/old"}
    meeting = Meeting("127.0.0.1", 1, None, "127.0.0.1")
    run = Run(Assignment(0, 0, 0, 1, 2), 0, 2)
    environ = worker_environment(inherited, JobSpec(("train",), 2), run, meeting, "agent", 0)
    assert (environ["OMP_NUM_THREADS"], environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]) == ("4", "0")
    assert "DISTTRAIN_TOKEN_FILE" not in environ
    alone = worker_environment({}, JobSpec(("train",), 1), run, meeting, "agent", 0)
    assert "OMP_NUM_THREADS" not in alone


def test_how_a_job_ended_is_said_last() -> None:
    spec = JobSpec(("train",), 2)
    failed = Failed(
        3, 1, 0, "host", 77, 1, 2.5, "step 1\rstep 2\nTraceback (most recent call last):\n  x\nError: y\n\n", "/l/e.log"
    )
    assert ending(failed, spec).splitlines() == [
        "disttrain-launch: the last lines on stderr of rank 3:",
        "    Traceback (most recent call last):",
        "      x",
        "    Error: y",
        "disttrain-launch: rank 3 failed first: exit code 1 after 2.5 s [node 0, host host, local rank 1, pid 77]",
        "    its whole stderr: /l/e.log",
    ]
    killed = ending(Failed(3, 1, 0, "host", 77, -9, 2.5, "", ""), spec)
    assert killed.splitlines()[0].startswith("disttrain-launch: rank 3 failed first: killed by SIGKILL after 2.5 s")
    assert "memory" in killed.splitlines()[1]
    assert ending(Interrupted(15, 0, "host"), spec) == "disttrain-launch: stopped by SIGTERM.\n"
    assert (
        ending(Interrupted(2, 1, "b"), JobSpec(("t",), 1, num_nodes=2))
        == "disttrain-launch: stopped by SIGINT on node 1 (b).\n"
    )
    assert ending(Lost("node 1 went away"), spec) == "disttrain-launch: node 1 went away\n"
    assert ending(Succeeded(), spec) == ""
