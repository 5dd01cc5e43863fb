"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """Args: text  a whole sentence with the offending action;  remedy  what to do;  rank, position  where, counting
    from 0, when it is about one action."""

    text: str
    remedy: str
    rank: int | None = None
    position: int | None = None

    @property
    def where(self) -> str:
        return "" if self.position is None else f"action {self.position}"

    def __str__(self) -> str:
        places = [] if self.rank is None else [f"rank {self.rank}"]
        places += [self.where] if self.where else []
        return f"{self.text} {self.remedy}" + (f" [{', '.join(places)}]" if places else "")
