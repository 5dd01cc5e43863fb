"""What the analyzer makes of the corpus: precision and recall of each kind, and the runs that it gets wrong."""

from __future__ import annotations

import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from disttrain.flight_recorder.analysis.analysis import Analysis, analyze
from disttrain.flight_recorder.analysis.verdict import Kind, Verdict
from tests.flight_corpus.case import Case
from tests.flight_corpus.cases import RUNS, SETS


@dataclass(frozen=True)
class Answer:
    """What was found of a case."""

    case: Case
    analysis: Analysis

    @property
    def verdict(self) -> Verdict:
        """The first one: that which people read."""
        return self.analysis.verdicts[0]

    @property
    def has_right_kind(self) -> bool:
        return self.verdict.kind in (self.case.kind, *self.case.also)

    @property
    def is_right(self) -> bool:
        """The right kind, ranks and cause, and the words that matter."""
        case, verdict = self.case, self.verdict
        said = " ".join([verdict.summary, *verdict.evidence])
        return (
            self.has_right_kind
            and verdict.ranks == case.ranks
            and (case.cause is None or verdict.cause is case.cause)
            and case.says in said
        )


def unpack(name: str, folder: Path) -> None:
    """The files of the run of that name."""
    with tarfile.open(RUNS / f"{name}.tar.xz") as archive:
        # As an argument Python knows it from 3.11.4 on; before that, there is none.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)


def answer(case: Case) -> Answer:
    """Analyze the files of one run."""
    with tempfile.TemporaryDirectory() as folder:
        unpack(case.name, Path(folder))
        return Answer(case, analyze(Path(folder)))


def sets_table(found: Iterable[Answer]) -> str:
    """A row for each set: runs, and how many are wholly right, at first sight and now; in Markdown."""
    right = {one.case.name for one in found if one.is_right}
    rows = ["| set | runs | right at first sight | right now |", "| --- | --- | --- | --- |"]
    for one in SETS:
        at_first = "-" if one.at_first is None else one.at_first
        rows.append(f"| {one.title} | {len(one.kept)} | {at_first} | {sum(case.name in right for case in one.kept)} |")
    return "\n".join(rows)


def table(found: Iterable[Answer]) -> str:
    """A row for each kind: runs, precision, recall, and how many have ranks and cause right too; in Markdown."""
    found = list(found)
    # A kind that the dumps cannot tell from the truth counts as the truth.
    told = {id(one): one.case.kind if one.has_right_kind else one.verdict.kind for one in found}
    true, named = Counter(one.case.kind for one in found), Counter(told.values())
    hits = Counter(one.case.kind for one in found if one.has_right_kind)
    whole = Counter(one.case.kind for one in found if one.is_right)
    rows = [
        "| what was wrong | runs | precision | recall | ranks, cause and place right too |",
        "| --- | --- | --- | --- | --- |",
    ]
    for kind in Kind:
        if true[kind] or named[kind]:
            precision, recall = _share(hits[kind], named[kind]), _share(hits[kind], true[kind])
            name = kind.value.replace("_", " ")
            rows.append(f"| {name} | {true[kind]} | {precision} | {recall} | {_share(whole[kind], true[kind])} |")
    num_right, num_whole = sum(hits.values()), sum(whole.values())
    rows.append(
        f"| all | {len(found)} | {_share(num_right, len(found))} | {_share(num_right, len(found))} "
        f"| {_share(num_whole, len(found))} |"
    )
    return "\n".join(rows)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"
