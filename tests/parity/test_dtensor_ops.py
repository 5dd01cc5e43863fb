"""The oracle over torch's OpInfos: a handful of them, what it notices, and the page that it writes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch.testing._internal.common_methods_invocations import op_db

import disttrain
from disttrain.dtensor import dispatch
from disttrain.dtensor.rules import pointwise
from disttrain.errors import LayoutError
from tests.dtensor_ops.judge import Outcome, judge, named_infos
from tests.dtensor_ops.page import page

BEYOND_REACH = {"linalg.matrix_rank", "linalg.matrix_rank hermitian"}
"""Their `out=` is written to without a call that a subclass of tensors could notice; the page says so."""
PAGE = Path(__file__).parents[2] / "docs" / "dtensor_ops.md"


def judged(name: str) -> Outcome:
    return judge(next(named_infos(op_db, [name])))


@pytest.mark.parametrize("name", ["add", "cumsum", "linalg.eigvals", "normal", "sort", "sum"])
def test_operators_are_right(name: str) -> None:
    outcome = judged(name)
    assert (outcome.verdict, outcome.example) == ("right", "")
    assert outcome.num_cases > 20


def test_wrong_values_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pointwise._LINEAR, "aten.exp", ((0,),))
    outcome = judged("exp")
    assert outcome.verdict == "wrong"
    assert "Partial(sum)" in outcome.example
    assert "_Wrong: result 0" in outcome.example


@pytest.mark.parametrize(
    ("ranks", "error", "verdict"),
    [
        ({0, 1, 2, 3}, LayoutError("exp", "no."), "refused"),
        ({0, 1, 2, 3}, KeyError("exp"), "crashes"),
        ({1}, LayoutError("exp", "no."), "differs"),
    ],
)
def test_errors_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, ranks: set[int], error: Exception, verdict: str
) -> None:
    find_rule = dispatch.find_rule

    def failing(call: Any) -> Any:
        if call.facts.name == "aten.exp" and disttrain.get_rank() in ranks:
            raise error
        return find_rule(call)

    monkeypatch.setattr(dispatch, "find_rule", failing)
    assert judged("exp").verdict == verdict


def test_the_page_is_the_commands() -> None:
    text = PAGE.read_text()
    rows = [
        re.fullmatch(r"\| (.+?) \| ([a-z ]+) \| (\d+) \| (gathers|) \| (.*) \|", line).groups()
        for line in text.splitlines()
        if line.startswith("| ") and line.count(" | ") >= 4 and not line.startswith(("| operator", "| ---"))
    ]
    # Which operators torch has depends on its version.
    assert len(rows) > 600
    outcomes = [
        Outcome(name, int(cases), len(gathers), [] if verdict in ("right", "no case") else [(verdict, example)])
        for name, verdict, cases, gathers, example in rows
    ]
    assert page(outcomes).splitlines()[:30] == text.splitlines()[:30]
    assert {outcome.name for outcome in outcomes if outcome.verdict in ("differs", "hangs", "wrong")} <= BEYOND_REACH
