"""`python -m tests.flight_corpus`: how the analyzer fares on the corpus, as the page on verdicts has it."""

from __future__ import annotations

import sys

from tests.flight_corpus.cases import KEPT
from tests.flight_corpus.score import answer, sets_table, table

found = [answer(case) for case in KEPT if not sys.argv[1:] or case.name in sys.argv[1:]]
print(f"{sets_table(found)}\n\n{table(found)}")
for one in found:
    if not one.is_right or sys.argv[1:]:
        case, verdict = one.case, one.verdict
        print(f"\n{case.name}: {case.kind} {case.ranks} {case.cause or ''} {case.says!r}")
        print(f"  found: {verdict.kind} {verdict.ranks} {verdict.cause or ''}\n  {verdict.summary}")
        for line in verdict.evidence:
            print(f"    - {line}")
        for line in one.analysis.notes:
            print(f"    note {line}")
        for other in one.analysis.verdicts[1:]:
            print(f"  then: {other.kind} {other.ranks} {other.summary}")
