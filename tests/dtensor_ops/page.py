"""The page that tells how DTensor does on every operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tests.dtensor_ops.judge import VERDICTS, Outcome

MAX_TEXT = 160
HEAD = """# DTensor on torch's operators

Made by `python -m tests.dtensor_ops --write docs/dtensor_ops.md`; don't edit it.

Each OpInfo of `torch.testing._internal.common_methods_invocations.op_db` is called on samples of its own, with its
operands sharded along each dim (unevenly, too), replicated, partial, and mixed, on meshes of 2, 3 and 2 x 2 ranks:
forward, gradients, in place and `out=`. The judge is the same call on plain tensors in one process.

| verdict | means |
| --- | --- |
| right | all values, gradients, shapes and dtypes are those of one process |
| refused | `LayoutError` on all ranks for at least one case; the others are right |
| crashes | another error, the same on all ranks |
| differs | some ranks raise and others don't |
| hangs | ranks wait for each other, or for too long |
| wrong | a value, a shape or a dtype differs from one process's |
| no case | it has no sample with strided tensors that torch runs on a CPU |

`torch.linalg.matrix_rank(out=)` gives `out` the memory of another tensor, beneath everything that a subclass of tensors
is asked about: on a DTensor it writes nothing.

"gathers" tells that some of its cases ran on whole tensors, for want of a rule.
"""


def page(outcomes: Sequence[Outcome]) -> str:
    """The whole page, in markdown."""
    counts = Counter(outcome.verdict for outcome in outcomes)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in (*VERDICTS, "no case") if counts[verdict])
    rows = [row(outcome) for outcome in sorted(outcomes, key=lambda outcome: outcome.name)]
    table = ["| operator | verdict | cases | gathers | example |", "| --- | --- | --- | --- | --- |", *rows]
    return "\n".join([HEAD, f"Of {len(outcomes)}: {summary}.", "", *table, ""])


def row(outcome: Outcome) -> str:
    """The operator's line of the table."""
    text = outcome.example.replace("|", "\\|")
    text = text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"
    gathers = "gathers" if outcome.num_gathers else ""
    return f"| {outcome.name} | {outcome.verdict} | {outcome.num_cases} | {gathers} | {text} |"
