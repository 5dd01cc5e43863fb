"""The page that tells how DTensor does on every operator."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from tests.dtensor_ops.judge import VERDICTS, Outcome

MAX_TEXT = 200
NO_CASE = "no case"

HEAD = """# DTensor on torch's operators

Made by `python -m tests.dtensor_ops --write docs/dtensor_ops.md`; don't edit it.

Each OpInfo of `torch.testing._internal.common_methods_invocations.op_db` is called on samples of its own, with its
operands sharded along each dim (unevenly, too), replicated, partial, and mixed, on meshes of 2, 3, 2 x 2,
1 x 3, 2 x 1 and 1 x 1 x 2 ranks: forward, gradients, in place and `out=`. The judge is the same call on plain tensors
in one process.
"""

MEANINGS = {
    "right": "all values, gradients, shapes and dtypes are those of one process",
    "refused": "`LayoutError` on all ranks for at least one case; the others are right",
    "crashes": "another error, the same on all ranks",
    "differs": "some ranks raise and others don't",
    "hangs": "ranks wait for each other, or for too long",
    "wrong": "a value, a shape or a dtype differs from one process's",
    NO_CASE: "it has no sample with strided tensors and a strided result that torch runs on a CPU",
}

WAYS = """What runs by rules computes on the ranks' parts, and moves what it must. What has no rule gathers its
operands: every rank computes the whole, and a warning says so once. Not counted are `out=` (of pointwise operators
copied from the result; of others computed on whole tensors, since it lies as the caller says), numbers that are read
(`item`), and random numbers (drawn alike on all ranks).
"""


def page(outcomes: Sequence[Outcome]) -> str:
    """The whole page, in markdown."""
    ordered = sorted(outcomes, key=lambda outcome: outcome.name)
    parts = [HEAD, _totals(ordered), "## Not right", "", *_table_of_others(ordered)]
    parts += ["", "## On whole tensors", "", WAYS, *_table_of_wholes(ordered)]
    parts += ["", "## All operators", "", *_table_of_all(ordered), ""]
    return "\n".join(parts)


def row(outcome: Outcome) -> str:
    """The operator's verdict, and an example of what is not right, as a line of a table."""
    text = outcome.example.replace("|", "\\|")
    text = text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"
    return f"| {outcome.name} | {outcome.verdict} | {text} |"


def way(outcome: Outcome) -> str:
    """How the operator runs: by rules, or some of it on whole tensors."""
    return "" if outcome.verdict == NO_CASE else "whole" if outcome.wholes else "rules"


def _totals(outcomes: Sequence[Outcome]) -> str:
    counts = Counter(outcome.verdict for outcome in outcomes)
    lines = [f"| {verdict} | {counts[verdict]} | {MEANINGS[verdict]} |" for verdict in (*VERDICTS, NO_CASE)]
    ways = Counter(way(outcome) for outcome in outcomes)
    cases = sum(outcome.num_cases for outcome in outcomes)
    table = ["| verdict | operators | means |", "| --- | --- | --- |", *lines]
    text = f"{len(outcomes)} operators in {cases} cases. {ways['rules']} run by rules throughout, {ways['whole']} "
    return "\n".join([text + "on whole tensors in some case.", "", *table, ""])


def _table_of_others(outcomes: Sequence[Outcome]) -> list[str]:
    worst_first = (*reversed(VERDICTS), NO_CASE)
    others = sorted(
        (outcome for outcome in outcomes if outcome.verdict != "right"),
        key=lambda outcome: worst_first.index(outcome.verdict),
    )
    return ["| operator | verdict | for example |", "| --- | --- | --- |", *map(row, others)]


def _table_of_wholes(outcomes: Sequence[Outcome]) -> list[str]:
    """By the operator that has no rule: which of torch's use it."""
    used_by: dict[str, list[str]] = defaultdict(list)
    for outcome in outcomes:
        for name in outcome.wholes:
            used_by[name].append(outcome.name)
    rows = [f"| `{name}` | {', '.join(used_by[name])} |" for name in sorted(used_by)]
    return ["| without a rule | met in |", "| --- | --- |", *rows]


def _table_of_all(outcomes: Sequence[Outcome]) -> list[str]:
    rows = [f"| {one.name} | {one.verdict} | {way(one)} | {one.num_cases} |" for one in outcomes]
    return ["| operator | verdict | way | cases |", "| --- | --- | --- | --- |", *rows]
