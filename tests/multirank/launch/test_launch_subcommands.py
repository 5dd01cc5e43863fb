"""The command's first word, variables for flags, and the token on standard input, as a shell gives them."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.multirank.launch.conftest import Launches

SCRIPT = """
    import os, sys
    print(os.environ["RANK"], os.environ["WORLD_SIZE"], sys.argv[1:])
"""


def test_run_is_what_is_meant_without(launches: Launches) -> None:
    script = launches.script(SCRIPT)
    for command in ((), ("run",)):
        assert launches.run(*command, script, "run").lines == ["[rank 0] 0 1 ['run']"]


def test_a_script_of_a_command_s_name_is_given_with_its_folder(launches: Launches) -> None:
    launches.script(SCRIPT, "submit")
    assert launches.run("./submit", "slurm").lines == ["[rank 0] 0 1 ['slurm']"]
    assert launches.run("run", "submit", "slurm").lines == ["[rank 0] 0 1 ['slurm']"]
    ended = launches.run("submit", "train.py")
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert ended.stderr == (
        "disttrain-launch submit: train.py is no cluster. Give slurm, kubernetes or ssh; a script called submit is "
        "./submit.\n"
    )


def test_variables_are_flags(launches: Launches) -> None:
    script = launches.script(SCRIPT)
    ended = launches.run(script, DISTTRAIN_LAUNCH_NPROC_PER_NODE="2", PET_NPROC_PER_NODE="3")
    assert sorted(ended.lines) == ["[rank 0] 0 2 []", "[rank 1] 1 2 []"]


def test_a_launcher_in_a_worker_reads_none_of_them(launches: Launches) -> None:
    inner = launches.script(SCRIPT, "inner.py")
    outer = launches.script(f"""
        import subprocess, sys
        subprocess.run([sys.executable, "-m", "disttrain_launch", "{inner}"], check=True)
    """)
    ended = launches.run(outer, DISTTRAIN_LAUNCH_NPROC_PER_NODE="2")
    assert sorted(ended.lines) == ["[rank 0] [rank 0] 0 1 []", "[rank 1] [rank 0] 0 1 []"]


def test_a_token_comes_on_standard_input_and_the_rest_is_the_worker_s(launches: Launches) -> None:
    token = launches.run("--new-token", "-").stdout
    script = launches.script("""
        import os, sys
        print([open(os.environ["DISTTRAIN_TOKEN_FILE"]).read(), sys.stdin.read()])
    """)
    done = subprocess.run(
        [sys.executable, "-m", "disttrain_launch", "--token-file", "-", script],
        cwd=launches.folder,
        env=launches.environ(),
        input=f"{token}more\n",
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout.splitlines() == [f"[rank 0] {[token, 'more' + chr(10)]}"], done.stderr


@pytest.mark.parametrize("line", ["", "\n", "short\n"])
def test_a_token_that_is_none_is_refused(launches: Launches, line: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "disttrain_launch", "--token-file", "-", launches.script(SCRIPT)],
        cwd=launches.folder,
        env=launches.environ(),
        input=line,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "token" in done.stderr
