"""README.md as a newcomer follows it: its scripts are written, its commands are run, in a folder elsewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.pages.code import NOT_RUN, Block, blocks, commands_with_output
from tests.pages.commands import OURS
from tests.surroundings.launching import FORK_CLIENT, LIMIT_S, environment, launched, launcher

if TYPE_CHECKING:
    from tests.forkserver.process import ForkServer

PAGE = "README.md"
SCRIPTS = [block for block in blocks(PAGE) if block.language == "python"]
COMMANDS = [
    [command for command, _ in commands_with_output(block)]
    for block in blocks(PAGE)
    if block.language == "sh" and not block.title.startswith(NOT_RUN)
]
SHORTENED = {
    "tp": (r"(STEPS = .*\b)\d+$", "2"),
    "pipeline": (r"(STEPS = .*\b)\d+$", "2"),
    "train_llama": (r"(NUM_EVALUATION_BATCHES = )\d+$", "1"),
}
"""What examples have no flag for: a pattern of all but the number, and the number. Other tests run them for longer."""
COPYING = "python -m disttrain.examples examples"
RUN_BY_COMMANDS = {word for commands in COMMANDS for command in commands for word in shlex.split(command)}
FAIL = {command for block in blocks(PAGE) if "on purpose" in block.title for command, _ in commands_with_output(block)}


def _here(command: str, server: ForkServer, *, shortened: bool = True) -> list[str]:
    """The command with this interpreter's programs in place of those on the path, scripts in forks, short trainings."""
    words = shlex.split(command)
    programs = {name: [sys.executable, "-m", module] for name, module in OURS.items()}
    programs["python"] = [sys.executable, *(() if words[1] == "-m" else (str(FORK_CLIENT), server.address))]
    if "examples/train_llama.py" in words:
        words += ["--steps", "2", "--sample", "2", "--seq", "32", "--batch", "8"]
    if shortened:
        words = [re.sub(rf"^examples/({'|'.join(SHORTENED)}).py$", r"examples/short_\1.py", word) for word in words]
    return [*{**programs, "disttrain-launch": launcher(server)}[words[0]], *words[1:]]


@pytest.mark.parametrize(
    "block", [block for block in SCRIPTS if block.title not in RUN_BY_COMMANDS], ids=lambda block: block.title
)
def test_a_script_of_the_readme_runs(block: Block, tmp_path: Path, fork_server: ForkServer) -> None:
    """As it stands there, by the launcher and by itself."""
    assert re.fullmatch(r"\w+\.py", block.title), "a script is shown by its file's name"
    script = tmp_path / block.title
    script.write_text(block.text, encoding="utf-8")
    launched(2, script, folder=tmp_path, server=fork_server)
    alone = fork_server.run(script, environ=environment())
    assert alone.returncode == 0, alone.stdout + alone.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Path:
    """A folder with the examples in it, copied as the page says, and its scripts."""
    folder = tmp_path_factory.mktemp("newcomer")
    assert [commands[0] for commands in COMMANDS].count(COPYING) == 1
    subprocess.run(_here(COPYING, fork_server), cwd=folder, env=environment(), check=True, capture_output=True)
    for block in SCRIPTS:
        (folder / block.title).write_text(block.text, encoding="utf-8")
    for name, (pattern, number) in SHORTENED.items():
        text = (folder / "examples" / f"{name}.py").read_text()
        short, changes = re.subn(pattern, rf"\g<1>{number}", text, flags=re.MULTILINE)
        assert changes == 1
        (folder / "examples" / f"short_{name}.py").write_text(short)
    return folder


@pytest.mark.sweep(2)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("commands", COMMANDS, ids=lambda commands: commands[-1])
def test_commands_of_the_readme_run(commands: list[str], folder: Path, fork_server: ForkServer) -> None:
    """Those of a block, one after the other; the first was run for `folder`."""
    for command in commands:
        done = subprocess.run(
            _here(command, fork_server),
            cwd=folder,
            # On busy cores the ranks of the example that hangs wait for 3 s before it does.
            env={**environment(), "DISTTRAIN_FLIGHT_SOFT_LIMIT_S": "12"},
            capture_output=True,
            text=True,
            timeout=860,  # four ranks share two cores
            check=False,
        )
        assert (done.returncode != 0) == (command in FAIL), done.stdout + done.stderr


@pytest.mark.sweep(0)
def test_the_planners_commands_run_where_there_is_no_repository(tmp_path: Path, fork_server: ForkServer) -> None:
    """Both that it prints, one after the other, as they stand; but for the number of steps."""
    planner = "python -m disttrain.plan --model tiny --gpus 2 --node-size 2 --seq 32 --batch-tokens 128 --no-compile"
    options = {"cwd": tmp_path, "env": environment(), "capture_output": True, "text": True, "timeout": LIMIT_S}
    said = subprocess.run(_here(planner, fork_server), check=True, **options).stdout  # type: ignore[call-overload]
    commands = said.partition("to run it:\n")[2].partition("\n\n")[0].splitlines()
    assert len(commands) == 2
    for command in commands:
        own = _here(command, fork_server, shortened=False)
        done = subprocess.run(own, check=False, **options)  # type: ignore[call-overload]
        assert done.returncode == 0, done.stdout + done.stderr
    assert "held out" in done.stdout
    assert (tmp_path / "runs" / "llama-1" / "loss.png").exists()


def test_a_script_by_itself_writes_checkpoints_beside_training(tmp_path: Path) -> None:
    """The writer is another process, which has to find the store of the one rank."""
    script = tmp_path / "train.py"
    script.write_text(
        f"""
import os

import torch

import disttrain
from disttrain.checkpoint import Checkpointer
from disttrain.fsdp2 import fully_shard

os.chdir({str(tmp_path)!r})
disttrain.init_process_group()
model = fully_shard(torch.nn.Linear(4, 4))
with Checkpointer("saves") as checkpointer:
    checkpointer.async_save(1, model.state_dict())
print(disttrain.get_rank(), disttrain.get_world_size(), torch.distributed.get_world_size())
""",
        encoding="utf-8",
    )
    variables = {**environment(), "TMPDIR": str(tmp_path / "temporary")}
    (tmp_path / "temporary").mkdir()
    # A Python of its own: the end of the process is a part of it.
    done = subprocess.run(
        [sys.executable, script], env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, ["0", "1", "1"]), done.stderr
    assert [path.name for path in (tmp_path / "saves").iterdir()] == ["step-00000001"]
    assert not list((tmp_path / "temporary").glob("disttrain-store-*"))


@pytest.mark.parametrize("name", ["collectives", "dtensor", "kernel", "mesh", "tp_mlp"])
def test_an_example_by_itself_is_one_rank(name: str, folder: Path, fork_server: ForkServer) -> None:
    done = fork_server.run(folder / "examples" / f"{name}.py", environ=environment())
    assert done.returncode == 0, done.stdout + done.stderr
