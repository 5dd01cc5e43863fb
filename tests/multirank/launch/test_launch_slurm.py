"""Real Slurm: srun starts a launcher on each of two nodes, and sbatch takes what `submit slurm` writes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from tests.surroundings.slurm import Slurm, slurm_cluster

if TYPE_CHECKING:
    from tests.multirank.launch.conftest import Launches

MEETING = """
    import os, sys
    from disttrain.store import TCPStore
    host, port = os.environ["DISTTRAIN_STORE"].rsplit(":", 1)
    store = TCPStore(host, int(port), timeout=120)
    store.barrier("all here", int(os.environ["WORLD_SIZE"]))
    store.close()
    print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "node", os.environ["GROUP_RANK"], sys.argv[1:])
"""
LAUNCHER = (sys.executable, "-m", "disttrain_launch")
LIMIT_S = 240.0


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with slurm_cluster() as slurm:
        yield slurm


def run(launches: Launches, slurm: Slurm, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=launches.folder,
        env={**launches.environ(), **slurm.environ, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def srun(
    launches: Launches, slurm: Slurm, *argv: str, tasks: str = "--ntasks-per-node=1"
) -> subprocess.CompletedProcess[str]:
    return run(launches, slurm, "srun", "--nodes=2", "--overcommit", tasks, *LAUNCHER, *argv)


def test_srun_needs_no_flags_about_nodes(launches: Launches, slurm: Slurm) -> None:
    done = srun(launches, slurm, "--nproc-per-node", "2", launches.script(MEETING), "a b")
    assert sorted(done.stdout.splitlines()) == [
        f"[rank {rank}] rank {rank} of 4 node {rank // 2} ['a b']" for rank in range(4)
    ], done.stderr
    found = r"disttrain-launch: Slurm step \d+\.0: 2 nodes, which meet at 127\.0\.0\.1:2\d{4}"
    assert [line for line in done.stderr.splitlines() if re.fullmatch(found, line)] == done.stderr.splitlines()
    assert len(done.stderr.splitlines()) == 1
    assert done.returncode == 0


def test_a_flag_that_contradicts_the_step_is_refused(launches: Launches, slurm: Slurm) -> None:
    done = srun(launches, slurm, "--nnodes", "3", launches.script(MEETING))
    assert re.search(r"--nnodes 3: Slurm step \d+\.0 has 2 nodes\.", done.stderr)
    assert done.returncode == 2


def test_a_node_alone_is_asked_for_in_words(launches: Launches, slurm: Slurm) -> None:
    done = srun(launches, slurm, "--standalone", launches.script(MEETING))
    assert done.stdout.splitlines() == ["[rank 0] rank 0 of 1 node 0 []"] * 2, done.stderr


def test_several_launchers_on_a_node_are_refused(launches: Launches, slurm: Slurm) -> None:
    done = srun(launches, slurm, launches.script(MEETING), tasks="--ntasks-per-node=2")
    assert (
        "starts 4 launchers on 2 nodes; one for each node is needed. Start it by srun --ntasks-per-node=1"
        in done.stderr
    )
    assert done.returncode == 2


def test_a_batch_script_without_srun_is_refused(launches: Launches, slurm: Slurm) -> None:
    launches.script(MEETING)
    wrapped = " ".join((*LAUNCHER, "script.py"))
    done = run(launches, slurm, "sbatch", "--wait", "--nodes=2", "--output=out", "--wrap", wrapped)
    said = (launches.folder / "out").read_text()
    assert re.search(
        r"Slurm job \d+ has 2 nodes, and this launcher was started on one of them alone\. Start it by srun", said
    )
    assert done.returncode == 2


def submit(launches: Launches, slurm: Slurm, *argv: str) -> subprocess.CompletedProcess[str]:
    return run(launches, slurm, *LAUNCHER, "submit", "slurm", "--output", "out", *argv)


def test_what_submit_writes_runs_with_odd_names_and_arguments(launches: Launches, slurm: Slurm) -> None:
    launches.folder = launches.folder / """it's a "folder" of $HOME, ü"""
    launches.folder.mkdir()
    script = launches.script(MEETING, """it's "mine" $HOME.py""")
    odd = ["--x", """it's "q" $HOME `id` ü""", ""]
    written = submit(launches, slurm, "--nnodes", "2", "--nproc-per-node", "2", "--write", "job.sh", script, *odd)
    assert (written.returncode, written.stdout) == (0, ""), written.stderr
    sent = run(launches, slurm, "sbatch", "--wait", "job.sh")
    said = (launches.folder / "out").read_text()
    assert sent.returncode == 0, said
    lines = [line for line in said.splitlines() if line.startswith("[rank ")]
    assert sorted(lines) == [f"[rank {rank}] rank {rank} of 4 node {rank // 2} {odd}" for rank in range(4)]


def test_the_job_s_exit_code_is_that_of_the_first_worker_that_failed(launches: Launches, slurm: Slurm) -> None:
    script = launches.script("""
        import os, sys, time
        if os.environ["RANK"] == "1":
            sys.exit(7)
        time.sleep(100)
    """)
    assert submit(launches, slurm, "--nnodes", "2", "--write", "job.sh", script).returncode == 0
    assert run(launches, slurm, "sbatch", "--wait", "job.sh").returncode == 7


def test_a_signal_before_the_end_lets_workers_save(launches: Launches, slurm: Slurm) -> None:
    """Slurm sends it to all processes of a step at once: launchers, their stores, workers."""
    script = launches.script("""
        import os, signal, sys, time
        def save(*_):
            time.sleep(3)  # longer than --stop-grace
            open(f"saved-{os.environ['RANK']}", "w").close()
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        print("ready", flush=True)
        time.sleep(100)
    """)
    sent = submit(launches, slurm, "--now", "--nnodes", "2", "--save-time", "30", "--nproc-per-node", "2", script)
    job = re.fullmatch(r"Submitted batch job (\d+)\n", sent.stdout)
    assert job is not None, sent.stderr
    out = launches.folder / "out"
    _wait(lambda: out.exists() and out.read_text().count("ready") == 4)
    assert run(launches, slurm, "scancel", "--signal", signal.SIGTERM.name, job[1]).returncode == 0
    _wait(lambda: len(list(launches.folder.glob("saved-*"))) == 4)
    _wait(lambda: not run(launches, slurm, "squeue", "--noheader").stdout)
    assert out.read_text().count("disttrain-launch: stopped by SIGTERM") == 2


def test_an_elastic_job_goes_on_without_a_node(launches: Launches, slurm: Slurm) -> None:
    """The second node's launcher is killed; the first node's worker starts again, alone."""
    script = launches.script("""
        import os, signal, sys, time
        print("world", os.environ["WORLD_SIZE"], flush=True)
        if os.environ["WORLD_SIZE"] == "1":
            sys.exit(0)
        if os.environ["GROUP_RANK"] == "1":
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(100)
    """)
    both = ("--sbatch", "nodes=2")
    flags = ("--nnodes", "1:2", "--max-restarts", "1", "--rdzv-conf", "last_call_timeout=2,keep_alive_max_attempt=3")
    assert submit(launches, slurm, "--write", "job.sh", *both, *flags, script).returncode == 0
    run(launches, slurm, "sbatch", "--wait", "job.sh")
    said = (launches.folder / "out").read_text()
    assert "[rank 0] world 2" in said
    assert said.count("world 1") == 1, said


def _wait(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.1)
