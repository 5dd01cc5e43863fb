"""The oracle over torch's OpInfos: a handful of them, what it notices, and the page that it writes."""

from __future__ import annotations

from typing import Any

import pytest
from torch.testing._internal.common_methods_invocations import op_db

import disttrain
from disttrain.dtensor import dispatch
from disttrain.dtensor.rules import pointwise
from disttrain.errors import LayoutError
from tests.dtensor_ops.judge import Outcome, judge, named_infos
from tests.dtensor_ops.page import page


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


def test_a_page_counts_verdicts_and_names_operators() -> None:
    outcomes = [Outcome("sin", 3, 0, []), Outcome("sort", 4, 1, [("refused", "why")]), Outcome("tan", 2, 2, [])]
    text = page(outcomes)
    assert "Of 3: 2 right, 1 refused." in text
    assert "| sin | right | 3 |  |  |" in text
    assert "| sort | refused | 4 | gathers | why |" in text
