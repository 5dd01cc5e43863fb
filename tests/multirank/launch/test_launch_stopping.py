"""Jobs that are told to go, as schedulers do it: they save, end with 75, and go on as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from disttrain import REQUEUE_EXIT_CODE
from tests.multirank.gated_storage import GatedStorage
from tests.pages.code import blocks

if TYPE_CHECKING:
    from tests.multirank.launch.conftest import Ended, Launches

SCRIPT = Path(__file__).parents[1] / "stopped_training.py"
NUM_STEPS = 90
LIMIT_S = 240.0
Notice = Callable[[Sequence[subprocess.Popen[str]], Path], None]


def launcher(number: int) -> Notice:
    """A notice to one node's launcher, the last one's."""
    return lambda nodes, folder: nodes[-1].send_signal(number)


def rank(number: int) -> Notice:
    """A notice to the last rank alone."""
    return lambda nodes, folder: os.kill(int(max(folder.glob("pid-*")).read_text()), number)


def launcher_twice(nodes: Sequence[subprocess.Popen[str]], folder: Path) -> None:
    nodes[-1].send_signal(signal.SIGUSR1)
    nodes[-1].send_signal(signal.SIGTERM)


NOTICES: dict[str, Notice] = {
    "SIGTERM to the launcher": launcher(signal.SIGTERM),
    "SIGUSR1 to the launcher": launcher(signal.SIGUSR1),
    "SIGTERM to a rank": rank(signal.SIGTERM),
    "SIGUSR1 to a rank": rank(signal.SIGUSR1),
    "two in a row": launcher_twice,
}


def num_done(folder: Path) -> int:
    losses = folder / "losses"
    return losses.read_text().count("\n") if losses.exists() else 0


def wait_for(is_so: Callable[[], bool], nodes: Sequence[subprocess.Popen[str]]) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < until_s
        assert all(node.poll() is None for node in nodes)
        time.sleep(0.001)


def start(
    launches: Launches, folder: Path, num_workers: int, *how: str, num_nodes: int = 1, port: int = 0
) -> list[subprocess.Popen[str]]:
    folder.mkdir(exist_ok=True)
    for pid in folder.glob("pid-*"):
        pid.unlink()
    flags = [["--nproc-per-node", str(num_workers)]]
    if num_nodes > 1:
        flags = [
            [*flags[0], "--nnodes", str(num_nodes), "--node-rank", str(node), "--master-port", str(port)]
            for node in range(num_nodes)
        ]
    return [launches.start(*these, str(SCRIPT), str(folder), str(NUM_STEPS), *how) for these in flags]


def ended(launches: Launches, nodes: Sequence[subprocess.Popen[str]]) -> list[Ended]:
    return [launches.end(node) for node in nodes]


@pytest.fixture(scope="module")
def losses() -> dict[int, str]:
    """Of the undisturbed runs that there have been, by their numbers of ranks."""
    return {}


@pytest.fixture
def undisturbed(forked_launches: Launches, losses: dict[int, str]) -> Callable[[int], str]:
    """The steps and losses of a run of so many ranks that nobody disturbs."""

    def run(num_ranks: int) -> str:
        if num_ranks not in losses:
            folder = forked_launches.folder / "undisturbed"
            (only,) = ended(forked_launches, start(forked_launches, folder, num_ranks))
            assert only.exit_code == 0, only.stderr
            losses[num_ranks] = (folder / "losses").read_text()
        return losses[num_ranks]

    return run


@pytest.mark.sweep(1)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_whenever_and_however_it_is_told_no_step_is_lost_or_done_twice(
    forked_launches: Launches, undisturbed: Callable[[int], str], num_ranks: int
) -> None:
    folder = forked_launches.folder / "told"
    draw = random.Random(num_ranks)
    steps = sorted(draw.sample(range(50), 4))
    for number, step in enumerate(steps):
        name = list(NOTICES)[(number + 4 * num_ranks) % len(NOTICES)]  # each of them with two numbers of ranks
        least = max(step, num_done(folder))
        nodes = start(forked_launches, folder, num_ranks)
        wait_for(lambda least=least: num_done(folder) > least, nodes)  # type: ignore[misc]
        NOTICES[name](nodes, folder)
        (only,) = ended(forked_launches, nodes)
        assert only.exit_code == REQUEUE_EXIT_CODE, (name, step, only.stderr)
        assert "Traceback" not in only.stderr
        assert "to be started again" in only.stderr.splitlines()[-1]
    (only,) = ended(forked_launches, start(forked_launches, folder, num_ranks))
    assert only.exit_code == 0, only.stderr
    assert (folder / "losses").read_text() == undisturbed(num_ranks)


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_notice_within_a_save_loses_no_step(
    forked_launches: Launches, undisturbed: Callable[[int], str], how: str
) -> None:
    folder = forked_launches.folder / "told"
    gate = forked_launches.folder / "gate"
    for name in ("SIGTERM to the launcher", "SIGTERM to a rank"):
        storage = GatedStorage(str(gate))
        with storage.shut():
            nodes = start(forked_launches, folder, 2, how, str(gate))
            storage.wait_until_reached()  # data are about to be written, and wait
            NOTICES[name](nodes, folder)
            time.sleep(0.3)
            assert nodes[0].poll() is None
        (only,) = ended(forked_launches, nodes)
        assert only.exit_code == REQUEUE_EXIT_CODE, (name, only.stderr)
        assert "Traceback" not in only.stderr
        gate = forked_launches.folder / "second gate"
    (only,) = ended(forked_launches, start(forked_launches, folder, 2))
    assert only.exit_code == 0, only.stderr
    assert (folder / "losses").read_text() == undisturbed(2)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["SIGTERM to the launcher", "SIGTERM to a rank"])
def test_of_two_nodes_one_need_be_told(
    forked_launches: Launches, undisturbed: Callable[[int], str], port: int, name: str
) -> None:
    folder = forked_launches.folder / "told"
    draw = random.Random(name)
    for step in sorted(draw.sample(range(50), 2)):
        least = max(step, num_done(folder))
        nodes = start(forked_launches, folder, 1, num_nodes=2, port=port)
        wait_for(lambda least=least: num_done(folder) > least, nodes)  # type: ignore[misc]
        NOTICES[name](nodes if draw.random() < 0.5 else nodes[:1], folder)
        assert [node.exit_code for node in ended(forked_launches, nodes)] == [REQUEUE_EXIT_CODE] * 2
    done = ended(forked_launches, start(forked_launches, folder, 1, num_nodes=2, port=port))
    assert [node.exit_code for node in done] == [0, 0]
    assert (folder / "losses").read_text() == undisturbed(2)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_notice_before_the_first_step_is_heard_after_it(
    forked_launches: Launches, undisturbed: Callable[[int], str], number: int
) -> None:
    folder = forked_launches.folder / "told"
    nodes = start(forked_launches, folder, 2)
    assert forked_launches.ready(nodes[0], 1) == ["[rank 0] asked\n"]
    wait_for(lambda: len(list(folder.glob("asked-*"))) == 2, nodes)
    nodes[0].send_signal(number)
    (only,) = ended(forked_launches, nodes)
    assert only.exit_code == REQUEUE_EXIT_CODE, only.stderr
    assert num_done(folder) < 20
    (only,) = ended(forked_launches, start(forked_launches, folder, 2))
    assert only.exit_code == 0, only.stderr
    assert (folder / "losses").read_text() == undisturbed(2)


def test_all_processes_of_a_job_may_be_told_as_slurm_does(
    forked_launches: Launches, undisturbed: Callable[[int], str]
) -> None:
    folder = forked_launches.folder / "told"
    nodes = start(forked_launches, folder, 2)
    # A writer that a test has forked hears nobody's signals before it begins.
    wait_for(lambda: any(save.name[5:].isdecimal() for save in (folder / "saves").glob("step-*")), nodes)
    told = forked_launches.living()
    assert len(told) >= 5, told  # launcher, warden, store and ranks; and writers of saves
    for process in told:
        process.send_signal(signal.SIGUSR1)
    (only,) = ended(forked_launches, nodes)
    assert only.exit_code == REQUEUE_EXIT_CODE, only.stderr
    (only,) = ended(forked_launches, start(forked_launches, folder, 2))
    assert only.exit_code == 0, only.stderr
    assert (folder / "losses").read_text() == undisturbed(2)


def test_a_notice_before_the_script_can_hear_it_is_not_lost(forked_launches: Launches) -> None:
    script = forked_launches.script("""
        import sys, time
        print("begun", flush=True)
        sys.stdin.readline()
        while not __import__("os").path.exists("go"):
            time.sleep(0.01)
        import disttrain
        disttrain.init_process_group()
        sys.exit(disttrain.REQUEUE_EXIT_CODE if disttrain.stop_requested() else 1)
    """)
    process = forked_launches.start("--nproc-per-node", "2", script)
    forked_launches.ready(process, 2)
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.3)  # nobody says when the launcher has heard it
    (forked_launches.folder / "go").touch()
    assert forked_launches.end(process).exit_code == REQUEUE_EXIT_CODE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_where_one_rank_asks_the_others_hear_of_it_with_their_first_question(
    forked_launches: Launches, number: int
) -> None:
    script = forked_launches.script("""
        import os, sys, time
        import disttrain
        disttrain.init_process_group()
        if disttrain.get_rank() == 0:
            is_told = disttrain.stop_requested()
            print("asks", flush=True)
        else:
            while not os.path.exists("go"):
                time.sleep(0.01)
            is_told = disttrain.stop_requested()
        while not is_told:
            time.sleep(0.01)
            is_told = disttrain.stop_requested()
        sys.exit(disttrain.REQUEUE_EXIT_CODE)
    """)
    process = forked_launches.start("--nproc-per-node", "2", script)
    assert forked_launches.ready(process, 1) == ["[rank 0] asks\n"]
    process.send_signal(number)
    time.sleep(0.5)  # nobody says when the launcher has heard it
    (forked_launches.folder / "go").touch()
    assert forked_launches.end(process).exit_code == REQUEUE_EXIT_CODE


@pytest.mark.parametrize("told", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_node_whose_ranks_have_not_asked_yet_hears_of_it_where_another_node_asks(
    forked_launches: Launches, port: int, number: int, told: int
) -> None:
    script = forked_launches.script("""
        import os, sys, time
        import disttrain
        disttrain.init_process_group()
        while disttrain.get_rank() == 0 and not os.path.exists("go"):
            time.sleep(0.01)
        num_steps = 0
        is_told = disttrain.stop_requested()
        while not is_told:
            time.sleep(0.01)
            num_steps += 1
            if num_steps == 5:
                print("asks", flush=True)
            is_told = disttrain.stop_requested()
        print("stops after", num_steps, flush=True)
        sys.exit(disttrain.REQUEUE_EXIT_CODE)
    """)
    flags = ["--nnodes", "2", "--master-port", str(port)]
    nodes = [forked_launches.start(*flags, "--node-rank", str(node), script) for node in range(2)]
    assert forked_launches.ready(nodes[1], 1) == ["[rank 1] asks\n"]
    time.sleep(0.2)  # The other rank hears in a thread that the first one asks.
    nodes[told].send_signal(number)
    time.sleep(0.5)  # nobody says when the launcher has heard it
    (forked_launches.folder / "go").touch()
    done = [forked_launches.end(node) for node in nodes]
    assert [node.exit_code for node in done] == [REQUEUE_EXIT_CODE] * 2, [node.stderr for node in done]
    assert done[0].lines[-1].split()[2:] == done[1].lines[-1].split()[2:]


def test_a_node_that_leaves_has_the_others_save_first(
    forked_launches: Launches, undisturbed: Callable[[int], str], port: int
) -> None:
    folder = forked_launches.folder / "told"
    folder.mkdir()
    flags = ["--nnodes", "1:2", "--master-port", str(port), "--no-standby", "--rdzv-conf", "last_call_timeout=1"]
    script = (str(SCRIPT), str(folder), str(NUM_STEPS))
    nodes = [forked_launches.start(*flags, "--node-rank", str(number), *script) for number in range(2)]
    wait_for(lambda: num_done(folder) > 20, nodes)
    nodes[1].send_signal(signal.SIGTERM)
    assert forked_launches.end(nodes[1]).exit_code == REQUEUE_EXIT_CODE
    stayed = forked_launches.end(nodes[0])
    assert stayed.exit_code == 0, stayed.stderr
    assert "leaves (SIGTERM)." in stayed.stderr
    steps = [line.split()[0] for line in (folder / "losses").read_text().splitlines()]
    assert steps == [str(step) for step in range(NUM_STEPS)]


def test_children_of_workers_live_while_these_save(launches: Launches) -> None:
    script = launches.script("""
        import signal, subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        def save(*_):
            print("child", child.poll(), flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        print("ready", flush=True)
        signal.pause()
    """)
    process = launches.start(script)
    launches.ready(process, 1)
    process.send_signal(signal.SIGTERM)
    ended = launches.end(process)
    assert ended.lines == ["[rank 0] child None"]
    assert ended.exit_code == 128 + signal.SIGTERM


def test_the_script_of_the_page_saves_leaves_and_goes_on(forked_launches: Launches) -> None:
    """docs/launching.md's, with SIGTERM as a scheduler sends it; then it is started again for three more steps."""
    (block,) = [block for block in blocks("docs/launching.md") if block.title == "preempted.py"]
    endless = block.text.replace("NUM_STEPS = 2000", "NUM_STEPS = 1_000_000")
    process = forked_launches.start("--nproc-per-node", "2", forked_launches.script(endless, block.title))
    assert all("goes on from step 0" in line for line in forked_launches.ready(process, 2))
    process.send_signal(signal.SIGTERM)
    stopped = forked_launches.end(process)
    assert stopped.exit_code == REQUEUE_EXIT_CODE, stopped.stderr
    (saved,) = (forked_launches.folder / "runs" / "preempted").glob("step-*")
    step = int(saved.name.removeprefix("step-"))
    short = block.text.replace("NUM_STEPS = 2000", f"NUM_STEPS = {step + 3}")
    again = forked_launches.run("--nproc-per-node", "2", forked_launches.script(short, block.title))
    assert again.exit_code == 0, again.stderr
    assert again.stdout.count(f"goes on from step {step}") == 2
