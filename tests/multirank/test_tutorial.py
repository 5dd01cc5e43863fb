"""docs/tutorial.md as a reader follows it, who has installed the wheel: its files are written, its commands are run in
a folder elsewhere, and print what it shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages.code import NOT_RUN, blocks, commands_with_output
from tests.surroundings.installed import built_wheel, new_environment
from tests.surroundings.launching import LIMIT_S

PAGE = "docs/tutorial.md"


def _words(text: str, folder: Path) -> str:
    return " ".join(text.replace(f"{folder}/", "").split())


PYTHONS = [sys.executable, *filter(None, os.environ.get("DISTTRAIN_TEST_PYTHONS", "").split(os.pathsep))]
"""This one, and those of other versions, with torch and what else the wheel needs, that `make wheels` has prepared."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("base", PYTHONS)
def test_the_tutorial_does_what_it_shows(tmp_path: Path, base: str) -> None:
    """Its programs load torch for themselves, since forks would have the repository's disttrain."""
    variables = new_environment(tmp_path / "environment", built_wheel(tmp_path / "wheel"), base)
    folder = tmp_path / "empty"
    folder.mkdir()

    def said(command: str) -> str:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        return done.stdout

    where = said("python -c 'import disttrain; print(disttrain.__file__)'")
    assert where.startswith(str(tmp_path / "environment"))
    num_commands = 0
    for block in blocks(PAGE):
        if block.language == "python":
            (folder / block.title).write_text(block.text, encoding="utf-8")
        elif not block.title.startswith(NOT_RUN):
            for command, shown in commands_with_output(block):
                output = said(command)
                printed = _words(output, folder)
                pieces = [_words(piece, folder) for line in shown.splitlines() for piece in line.split("...")]
                missing = [piece for piece in pieces if piece not in printed]
                assert missing == [], f"{command}\n{output}"
                num_commands += 1
    assert num_commands == 8
