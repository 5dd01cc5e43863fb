"""The page on pipelines: its table and pictures are what the command prints and draws, its names are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from disttrain import pipelining
from disttrain.pipelining.cli import main

DOCS = Path(__file__).parents[2] / "docs"


def test_the_table_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "pipelines.md").read_text(encoding="utf-8")
    arguments, table = re.findall(r"\$ python -m disttrain.pipelining (compare .*)\n((?:.*\n)+?)```", page)[0]
    assert main(arguments.split()) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == table.splitlines()


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_the_pictures_are_what_the_command_draws(name: str, tmp_path: Path) -> None:
    assert main(["show", name, "--ranks", "4", "--microbatches", "8", "--svg", str(tmp_path / "drawn.svg")]) == 0
    drawn = (tmp_path / "drawn.svg").read_text(encoding="utf-8")
    assert (DOCS / "images" / f"{name}.svg").read_text(encoding="utf-8") == drawn


def test_each_schedule_has_a_line() -> None:
    page = (DOCS / "pipelines.md").read_text(encoding="utf-8")
    classes = {name for name in pipelining.__all__ if re.match(r"Schedule\w", name)}
    assert classes <= set(re.findall(r"`(Schedule\w+)`", page))
