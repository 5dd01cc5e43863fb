"""The oracle over torch's OpInfos: a handful of them, what it notices, and the page that it writes."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import disttrain
from disttrain.dtensor.dispatch import dispatch
from disttrain.dtensor.rules import pointwise
from disttrain.errors import LayoutError
from tests.dtensor_ops.cases import MESHES
from tests.dtensor_ops.infos import all_infos, info_named, title
from tests.dtensor_ops.judge import Outcome, judge
from tests.dtensor_ops.page import MEANINGS, page

TRIED = MESHES[1:4]
"""`python -m tests.dtensor_ops` tries the others as well."""


def judged(name: str, *meshes: tuple[int, ...]) -> Outcome:
    with mock.patch("tests.dtensor_ops.judge.MESHES", meshes or TRIED):
        return judge(info_named(name))


SAMPLED = (
    "__getitem__",
    "as_strided",
    "cumsum",
    "einsum",
    "gather",
    "index_put",
    "linalg.det",
    "masked_scatter",
    "mm",
    "nn.functional.avg_pool3d",
    "nn.functional.embedding",
    "norm",
    "normal",
    "softmax",
    "sort",
    "sum",
    "view_as",
)
"""A few of each family; `python -m tests.dtensor_ops` tries all. tests/unit/test_dtensor_*.py have others by case."""


@pytest.mark.parametrize("name", SAMPLED)
def test_operators_are_right(name: str) -> None:
    outcome = judged(name)
    assert (outcome.verdict, outcome.example) == ("right", "")
    assert outcome.num_cases > 15


def test_wrong_values_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pointwise._LINEAR, "aten.exp", ((0,),))
    outcome = judged("exp", (2,))
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
    assert judged("exp", (2, 2)).verdict == verdict


def test_a_page_counts_verdicts_and_names_operators() -> None:
    outcomes = [
        Outcome("sin", 3),
        Outcome("sort", 4, {"aten.sort"}, [("refused", "why | not")]),
        Outcome("tan", 2),
        Outcome("sparse"),
    ]
    text = page(outcomes)
    assert "4 operators in 9 cases. 2 run by rules throughout, 1 on whole tensors in some case." in text
    assert "| right | 2 |" in text
    assert "| no case | 1 |" in text
    assert "| sort | refused | why \\| not |" in text
    assert "| `aten.sort` | sort |" in text
    assert "| sin | right | rules | 3 |" in text
    assert "| sparse | no case |  | 0 |" in text


def test_the_page_lists_every_operator_of_torch() -> None:
    """Made by the command anew when torch's operators change; what is worse than refused may not stay."""
    text = PAGE.read_text()
    totals, others, wholes, everything = (rows_of(text, heading) for heading in HEADINGS)
    names = sorted(title(info) for info in all_infos())
    assert [cells[0] for cells in everything] == names
    counted = Counter(cells[1] for cells in everything)
    assert {cells[0]: int(cells[1]) for cells in totals} == {verdict: counted[verdict] for verdict in MEANINGS}
    assert [cells[0] for cells in others if cells[1] not in ("refused", "no case")] == []
    assert sorted(cells[0] for cells in others) == [cells[0] for cells in everything if cells[1] != "right"]
    met_in = {name for cells in wholes for name in cells[1].split(", ")}
    assert met_in == {cells[0] for cells in everything if cells[2] == "whole"}


PAGE = Path(__file__).parents[2] / "docs" / "dtensor_ops.md"
HEADINGS = ("| verdict |", "| operator | verdict | for example |", "| without a rule |", "| operator | verdict | way |")


def rows_of(text: str, heading: str) -> list[list[str]]:
    """The cells of the table that begins with `heading`."""
    lines = text[text.index(heading) :].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]
