"""docs/tutorial.md as a reader follows it: its files are written, its commands are run in a folder elsewhere, and print
what it shows. Here workers are forks; `make wheels` has all loaded from the installed wheel."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.pages.code import NOT_RUN, blocks, commands_with_output
from tests.surroundings.installed import built_wheel, new_environment
from tests.surroundings.launching import LIMIT_S, environment, launcher

if TYPE_CHECKING:
    from tests.forkserver.process import ForkServer

PAGE = "docs/tutorial.md"

PYTHONS = [*filter(None, os.environ.get("DISTTRAIN_TEST_PYTHONS", "").split(os.pathsep))]
"""Those of all versions, with torch and what else the wheel needs, that `make wheels` has prepared."""


def _words(text: str, folder: Path) -> str:
    return " ".join(text.replace(f"{folder}/", "").split())


def _said(command: str, folder: Path, variables: Mapping[str, str]) -> str:
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


def _follow(folder: Path, variables: Mapping[str, str]) -> None:
    folder.mkdir()
    num_commands = 0
    for block in blocks(PAGE):
        if block.language == "python":
            (folder / block.title).write_text(block.text, encoding="utf-8")
        elif not block.title.startswith(NOT_RUN):
            for command, shown in commands_with_output(block):
                output = _said(command, folder, variables)
                printed = _words(output, folder)
                pieces = [_words(piece, folder) for line in shown.splitlines() for piece in line.split("...")]
                missing = [piece for piece in pieces if piece not in printed]
                assert missing == [], f"{command}\n{output}"
                num_commands += 1
    assert num_commands == 8


@pytest.mark.sweep(0)
@pytest.mark.timeout(900)
def test_the_tutorial_does_what_it_shows(tmp_path: Path, fork_server: ForkServer) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, command in (
        ("python", [sys.executable]),
        ("disttrain-launch", launcher(fork_server)),
        ("disttrain-flight", [sys.executable, "-m", "disttrain.flight_recorder.cli"]),
    ):
        (programs / name).write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n', encoding="utf-8")
        (programs / name).chmod(0o755)
    variables = environment()
    _follow(tmp_path / "empty", {**variables, "PATH": f"{programs}{os.pathsep}{variables.get('PATH', os.defpath)}"})


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("base", PYTHONS)
def test_the_tutorial_does_with_the_wheel_what_it_shows(tmp_path: Path, base: str) -> None:
    variables = new_environment(tmp_path / "environment", built_wheel(tmp_path / "wheel"), base)
    where = _said("python -c 'import disttrain; print(disttrain.__file__)'", tmp_path, variables)
    assert where.startswith(str(tmp_path / "environment"))
    _follow(tmp_path / "empty", variables)
