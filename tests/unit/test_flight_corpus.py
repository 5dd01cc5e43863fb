"""The analyzer on real runs that went wrong on purpose, and on runs in which nothing did."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from disttrain.flight_recorder.analysis.verdict import Kind
from disttrain.flight_recorder.cli import main
from tests.flight_corpus.case import GLOO, Case
from tests.flight_corpus.cases import CASES, KEPT, MISSED, RUNS
from tests.flight_corpus.score import answer, sets_table, table, unpack

PAGE = Path(__file__).parents[2] / "docs" / "flight_verdicts.md"
MIN_HANGS, MIN_HEALTHY = 40, 20


def _as_known(case: Case) -> object:
    marks = [pytest.mark.xfail(reason=MISSED[case.name])] if case.name in MISSED else []
    return pytest.param(case, id=case.name, marks=marks)


@pytest.mark.parametrize("case", [_as_known(case) for case in KEPT])
def test_the_cause_is_named(case: Case) -> None:
    found = answer(case)
    assert found.is_right, (found.verdict.kind, found.verdict.ranks, found.verdict.cause, found.verdict.summary)


def test_each_case_has_a_run_and_each_run_a_case() -> None:
    kept = {case.name for case in KEPT}
    assert kept == {file.name.split(".")[0] for file in RUNS.iterdir()}
    assert {case.name for case in CASES if case.backend == GLOO} <= kept
    assert MISSED.keys() <= kept
    num_healthy = sum(case.kind is Kind.NOTHING_WRONG for case in KEPT)
    assert num_healthy >= MIN_HEALTHY
    assert len(KEPT) - num_healthy >= MIN_HANGS


def test_the_page_has_the_figures() -> None:
    found = list(map(answer, KEPT))
    assert sets_table(found) in PAGE.read_text()
    assert table(found) in PAGE.read_text()


@pytest.mark.parametrize("case", random.Random(3).sample(KEPT, 12), ids=lambda case: case.name)
def test_damage_makes_no_traceback(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(case.name)
    for number in range(3):
        folder = tmp_path / str(number)
        unpack(case.name, folder)
        for file in folder.iterdir():
            damage(file, draw)
        codes = {kind.exit_code for kind in Kind}
        assert main([str(folder), "--json"]) in codes
        assert main([str(folder)]) in codes
        captured = capsys.readouterr()
        assert captured.err == ""
        assert captured.out


def damage(file: Path, draw: random.Random) -> None:
    """Cut it off, or change some of its bytes, or name it otherwise, or leave it."""
    data = bytearray(file.read_bytes())
    match draw.randrange(4):
        case 0:
            del data[draw.randrange(len(data) + 1) :]
        case 1:
            for _ in range(20 if data else 0):
                data[draw.randrange(len(data))] = draw.randrange(256)
        case 2:
            file = file.rename(file.with_name(f"copy-of-{file.name}"))
    file.write_bytes(data)
