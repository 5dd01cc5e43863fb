"""One run of the corpus: what each rank does, and what an analyzer of its dumps should say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from disttrain.flight_recorder.analysis.verdict import Cause, Kind

TIMEOUT_S: Final = 60.0
"""Of a collective, in most runs: longer than any lasts."""

GLOO, NCCL = "gloo", "nccl"
"""Backends."""

Run = Callable[[int], None]


@dataclass(frozen=True)
class Case:
    """`run` is called on each of `num_ranks` ranks with its rank.

    `kind`, `ranks` and `cause` are the truth; `says` a text that the verdict must have in its summary or evidence, such
    as the name of the function at fault. `also` are kinds that the dumps cannot tell from it. `timeout_s` is that of
    the collectives; `is_signalled`: all are told to dump while they run, by SIGUSR2, after a while. `backend` carries
    its tensors.
    """

    run: Run
    kind: Kind
    ranks: tuple[int, ...] = ()
    cause: Cause | None = None
    says: str = ""
    num_ranks: int = 3
    also: tuple[Kind, ...] = ()
    timeout_s: float = TIMEOUT_S
    is_signalled: bool = False
    backend: str = GLOO

    @property
    def name(self) -> str:
        """Of its run's archive, too."""
        return self.run.__name__ if self.backend == GLOO else f"{self.backend}_{self.run.__name__}"


Cases = list[Case]
"""Of one file, in order."""


def labelled(cases: Cases, kind: Kind, *ranks: int, cause: Cause | None = None, **more: object) -> Callable[[Run], Run]:
    """Add the function to `cases` with this truth."""

    def add(run: Run) -> Run:
        cases.append(Case(run, kind, ranks, cause, **more))  # type: ignore[arg-type]
        return run

    return add
