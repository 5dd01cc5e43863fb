"""`disttrain.launch`, from a process that runs already: what a person's cells do, go wrong with, and are shown."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.pages.code import CELL, blocks
from tests.surroundings.launching import LIMIT_S, environment

if TYPE_CHECKING:
    from tests.forkserver.process import ForkServer

BEGIN = """
import os, signal, sys, time
import torch
import disttrain
"""


def run(server: ForkServer, folder: Path, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The code as a script's, whose functions are in `__main__`, as a cell's are."""
    script = folder / "cell.py"
    script.write_text(BEGIN + textwrap.dedent(code), encoding="utf-8")
    return server.run(script, environ={**environment(), **variables})


def shown(server: ForkServer, folder: Path, code: str, **variables: str) -> str:
    done = run(server, folder, code, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_ranks_have_all_that_the_process_has(fork_server: ForkServer, tmp_path: Path) -> None:
    """Data, classes and closures; what each returns comes back, by rank."""
    code = """
    data = torch.arange(4.0)

    class Model(torch.nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.factor = factor

        def forward(self, x):
            return self.factor * x

    def make(offset):
        def compute(model, lr=0.1):
            disttrain.init_process_group()
            x = model(data) + offset + disttrain.get_rank()
            disttrain.all_reduce(x)
            data.zero_()
            return {"x": x, "rank": disttrain.get_rank(), "lr": lr, "torch": torch.distributed.get_world_size()}
        return compute

    answers = disttrain.launch(make(10.0), (Model(2.0),), 3, kwargs={"lr": 0.5})
    for rank, answer in enumerate(answers):
        torch.testing.assert_close(answer["x"], 3 * (2 * torch.arange(4.0) + 10.0) + 3)
        assert (answer["rank"], answer["lr"], answer["torch"]) == (rank, 0.5, 3), answer
    assert data.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert disttrain.launch(lambda: None) == [None]
    print(disttrain.launch(os.getenv, ("RANK",), nproc=2), os.getenv("RANK"))
    """
    assert shown(fork_server, tmp_path, code).splitlines()[-1] == "['0', '1'] None"


def test_ranks_compute_with_threads_after_the_process_has(fork_server: ForkServer, tmp_path: Path) -> None:
    """OpenMP's pool, which no fork has, and autograd's."""
    code = """
    torch.set_num_threads(2)
    big = torch.ones(1 << 20, requires_grad=True)
    (big.exp() * 2).sum().backward()

    def compute():
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        x = torch.ones(1 << 20, requires_grad=True)
        (x.exp() * 2).sum().backward()
        return before, x.grad.sum().item() > 0

    before, is_right = disttrain.launch(compute, nproc=2)[1]
    print(before, is_right)
    """
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert shown(fork_server, tmp_path, code, OMP_NUM_THREADS="").split() == [str(share), "True"]


def test_each_line_has_its_rank(fork_server: ForkServer, tmp_path: Path) -> None:
    code = """
    import logging
    logging.basicConfig(format="logged: %(message)s")

    def speak():
        rank = os.environ["RANK"]
        print(f"one {rank}\\ntwo {rank}")
        os.write(1, f"from C {rank}\\n".encode())
        print(f"error {rank}", file=sys.stderr)
        logging.warning(rank)
        for percent in range(0, 101, 20):
            sys.stderr.write(f"\\r{percent}% {rank}")
            sys.stderr.flush()
        print(f"unfinished {rank}", end="")

    disttrain.launch(speak, nproc=2)
    """
    done = run(fork_server, tmp_path, code)
    assert done.returncode == 0, done.stderr
    for rank in "01":
        lines = {
            name: [
                line.removeprefix(f"[rank {rank}] ") for line in text.split("\n") if line.startswith(f"[rank {rank}]")
            ]
            for name, text in (("out", done.stdout), ("err", done.stderr))
        }
        assert sorted(lines["out"]) == sorted([f"one {rank}", f"two {rank}", f"from C {rank}", f"unfinished {rank}"])
        assert lines["err"] == [f"error {rank}", f"logged: {rank}", f"100% {rank}"]
    assert all(line.startswith("[rank ") for line in (done.stdout + done.stderr).splitlines())
    assert "\r" not in done.stdout + done.stderr


def test_the_rank_that_failed_first_is_shown_last_and_whole(fork_server: ForkServer, tmp_path: Path) -> None:
    """The other one's error is a consequence, and is not shown; it is not waited for either."""
    code = """
    def inner():
        raise ValueError("no such\\ncolumn")

    def train():
        disttrain.init_process_group()
        print("begun")
        if disttrain.get_rank() == 1:
            inner()
        disttrain.barrier()
        time.sleep(1000)

    try:
        disttrain.launch(train, nproc=3)
    except disttrain.errors.LaunchError as error:
        print(error.rank, error)
    """
    out = shown(fork_server, tmp_path, code)
    story = out.partition("1 launch: ")[2]
    assert story.startswith("train failed on rank 1 of 3.\n\nTraceback (most recent call last):\n")
    assert re.findall(r"line \d+, in (\w+)", story) == ["train", "inner"]
    assert story.endswith("ValueError: no such\ncolumn\n")
    assert out.count("Traceback") == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "Its process was ended by SIGKILL. That is how Linux ends what takes"),
        ("os._exit(3)", "Its process ended with exit code 3, without a word."),
        ("sys.exit(3)", "SystemExit: 3"),
        (
            "return torch.nn.Linear(2, 2)",
            "has returned cannot travel: Linear is neither plain, a tensor nor an array. R",
        ),
        (
            "return [{'a': print}]",
            "cannot travel: builtin_function_or_method is neither plain, a tensor nor an array. R",
        ),
        ("raise ValueError('\\udc80')", "ValueError: \\udc80"),
    ],
    ids=["killed", "gone", "left", "model", "function", "surrogate"],
)
def test_other_ends_are_told(body: str, words: str, fork_server: ForkServer, tmp_path: Path) -> None:
    code = f"""
    def train():
        if os.environ["RANK"] == "0":
            time.sleep(1000)
        {body}

    disttrain.launch(train, nproc=2)
    """
    done = run(fork_server, tmp_path, code)
    assert done.returncode == 1
    assert words in done.stderr.splitlines()[-1]
    assert "launch: train failed on rank 1 of 2." in done.stderr


def test_a_sharded_parameter_comes_back_whole_or_is_refused(fork_server: ForkServer, tmp_path: Path) -> None:
    code = """
    from disttrain.fsdp2 import fully_shard

    def train(is_whole):
        disttrain.init_process_group()
        torch.manual_seed(0)
        state = fully_shard(torch.nn.Linear(3, 5)).state_dict()
        return {name: value.full_tensor() for name, value in state.items()} if is_whole else state

    torch.manual_seed(0)
    for state in disttrain.launch(train, (True,), nproc=2):
        torch.testing.assert_close(state, dict(torch.nn.Linear(3, 5).state_dict()))
        torch.manual_seed(0)
    disttrain.launch(train, (False,), nproc=2)
    """
    done = run(fork_server, tmp_path, code)
    assert (
        "ShapeError: launch: what the function has returned cannot travel: a DTensor is a part on each rank. Ret"
        in done.stderr
    )


def test_what_cannot_be_launched_is_refused(fork_server: ForkServer, tmp_path: Path) -> None:
    code = """
    def refused(*args, **kwargs):
        try:
            disttrain.launch(*args, **kwargs)
        except disttrain.errors.LaunchError as error:
            print(error)

    refused(3)
    refused(print, "abc")
    refused(print, 5)
    refused(print, nproc=0)
    refused(print, nproc="2")
    disttrain.init_process_group()
    refused(print, nproc=2)
    disttrain.destroy_process_group()
    disttrain.launch(print, ("now it can",), nproc=2)
    """
    lines = shown(fork_server, tmp_path, code).splitlines()
    assert lines[:5] == [
        "launch: 3 is no function. Give the function, and its arguments as args.",
        "launch: args is 'abc', no tuple of arguments. Give args=('abc',).",
        "launch: args is 5, no tuple of arguments. Give args=(5,).",
        "launch: nproc is 0. Give the number of ranks, from 1 on.",
        "launch: nproc is '2'. Give the number of ranks, from 1 on.",
    ]
    problem = "launch: this process is a rank already, and forks would share its connections."
    assert lines[5] == f"{problem} Call disttrain.destroy_process_group() first."
    assert sorted(lines[6:]) == ["[rank 0] now it can", "[rank 1] now it can"]


RANKS_THAT_STAY = """
def stay():
    import subprocess
    child = subprocess.Popen(["sleep", "1000"])
    print("pids", os.getpid(), child.pid, flush=True)
    {body}

try:
    disttrain.launch(stay, nproc=2)
except KeyboardInterrupt:
    print("interrupted")
    print(disttrain.launch(os.getpid, nproc=1)[0] > 0)
"""


def _started(server: ForkServer, folder: Path, body: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A process that has launched two ranks, and the ranks with what they have started."""
    script = folder / "cell.py"
    script.write_text(BEGIN + RANKS_THAT_STAY.format(body=body), encoding="utf-8")
    process = server.start(script, environ=environment())
    assert process.stdout is not None
    lines = [process.stdout.readline().split() for _ in range(2)]
    return process, [psutil.Process(int(pid)) for line in lines for pid in line[3:]]


@pytest.mark.parametrize("body", ["time.sleep(1000)", "signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(1000)"])
def test_an_interrupt_ends_the_ranks(body: str, fork_server: ForkServer, tmp_path: Path) -> None:
    """Also those that take no notice; the next cell can be run at once."""
    process, ranks = _started(fork_server, tmp_path, body)
    assert len(ranks) == 4
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT_S)
    assert out.splitlines() == ["interrupted", "True"], err
    assert psutil.wait_procs(ranks, timeout=60)[1] == []


def test_ranks_end_with_the_process(fork_server: ForkServer, tmp_path: Path) -> None:
    """As when the kernel is restarted."""
    process, ranks = _started(fork_server, tmp_path, "time.sleep(1000)")
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=LIMIT_S)
    assert psutil.wait_procs(ranks, timeout=60)[1] == []


CELLS = [block.text for block in blocks("docs/notebooks.md") if block.title.startswith(CELL)]


def test_the_cells_of_the_page_run(fork_server: ForkServer, tmp_path: Path) -> None:
    """One after the other, as a script."""
    code = "\n\n".join([*CELLS, "print(len(CELLS := losses))"])
    lines = shown(fork_server, tmp_path, code).splitlines()
    assert (lines[0], lines[-1]) == ("0 1", "2")
    losses = dict(re.findall(r"\[rank 1\] step (\d): loss ([\d.]+)", "\n".join(lines)))
    assert float(losses["5"]) < float(losses["0"])


@pytest.mark.sweep(0)
def test_a_stored_notebook_keeps_what_ranks_print(tmp_path: Path) -> None:
    """A real kernel runs the page's cells, one that is interrupted, one that fails, and one after it."""
    nbclient = pytest.importorskip("nbclient", reason="nbclient, which runs notebooks, is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel, a notebook's Python, is not installed")
    nbformat = pytest.importorskip("nbformat")
    fails = """
from IPython.display import HTML, display
from tqdm import tqdm

def show():
    display(HTML("<b>x</b>"))
    for _ in tqdm(range(3)):
        pass
    try:
        input("name?")
    except EOFError as error:
        print(error)
    if os.environ["RANK"] == "1":
        raise ValueError("no such column")
    time.sleep(1000)

disttrain.launch(show, nproc=2)
"""
    sleeps = """
def sleep():
    print("asleep")
    time.sleep(1000)

disttrain.launch(sleep, nproc=2)
"""
    sources = [BEGIN, *CELLS, sleeps, fails, "disttrain.launch(os.getpid)[0] > 0"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    client = nbclient.NotebookClient(
        notebook,
        timeout_func=lambda cell: 5.0 if cell.source == sleeps else LIMIT_S,
        interrupt_on_timeout=True,
        allow_errors=True,
        resources={"metadata": {"path": tmp_path}},
    )
    client.execute(env=environment())
    _, _, trained, interrupted, failed, after = notebook.cells
    text = "".join(output.text for output in trained.outputs if output.output_type == "stream")
    assert min(text.splitlines()).startswith("[rank 0] step 0: loss ")
    assert len(text.splitlines()) == 4
    assert interrupted.outputs[-1].ename == "KeyboardInterrupt"
    text = "".join(output.text for output in interrupted.outputs if output.output_type == "stream")
    assert sorted(text.splitlines()) == ["[rank 0] asleep", "[rank 1] asleep"]
    streams = "".join(output.text for output in failed.outputs if output.output_type == "stream")
    assert all(line.startswith("[rank ") for line in streams.splitlines()), streams
    assert "[rank 1] <IPython.core.display.HTML object>" in streams
    assert "[rank 1] a rank has no input: ask before launch, and hand the answer over" in streams
    assert re.search(r"\[rank 1\] 100%.* 3/3 ", streams)
    assert "\r" not in streams
    assert failed.outputs[-1].output_type == "error"
    assert failed.outputs[-1].evalue.endswith(
        'in show\n    raise ValueError("no such column")\nValueError: no such column'
    )
    assert after.outputs[0].data["text/plain"] == "True"
