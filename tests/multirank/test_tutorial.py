"""docs/tutorial.md as a reader follows it: its files are written, its commands are run, and print what it shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.pages.code import NOT_RUN, blocks, commands_with_output
from tests.pages.commands import OURS
from tests.surroundings.launching import LIMIT_S, environment, launcher

if TYPE_CHECKING:
    from tests.forkserver.process import ForkServer

PAGE = "docs/tutorial.md"
PROGRAMS = {"python": [sys.executable], **{name: [sys.executable, "-m", module] for name, module in OURS.items()}}


def _installed(command: str, server: ForkServer) -> str:
    """The command with this interpreter's programs in place of those on the path, and forked workers."""
    programs = {**PROGRAMS, "disttrain-launch": launcher(server)}
    return re.sub(r"(?<![\w/.-])(disttrain-\w+|python)(?= )", lambda found: shlex.join(programs[found[1]]), command)


def _words(text: str, folder: Path) -> str:
    return " ".join(text.replace(f"{folder}/", "").split())


@pytest.mark.timeout(300)
def test_the_tutorial_does_what_it_shows(tmp_path: Path, fork_server: ForkServer) -> None:
    num_commands = 0
    for block in blocks(PAGE):
        if block.language == "python":
            (tmp_path / block.title).write_text(block.text, encoding="utf-8")
        elif not block.title.startswith(NOT_RUN):
            for command, shown in commands_with_output(block):
                done = subprocess.run(
                    ["bash", "-c", _installed(command, fork_server)],
                    cwd=tmp_path,
                    env=environment(),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    timeout=LIMIT_S,
                    check=False,
                )
                printed = _words(done.stdout, tmp_path)
                pieces = [_words(piece, tmp_path) for line in shown.splitlines() for piece in line.split("...")]
                missing = [piece for piece in pieces if piece not in printed]
                assert missing == [], f"{command}\n{done.stdout}"
                num_commands += 1
    assert num_commands == 8
