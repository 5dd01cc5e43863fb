"""CommDebugMode: which collectives a piece of code runs, how often, and how many bytes they are given."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Self

from disttrain.process_group import current_world

if TYPE_CHECKING:
    from disttrain.errors import DisttrainError
    from disttrain.process_group import Call


class CommDebugMode:
    """Counts this rank's collectives while it is entered; whoever calls them: DTensor, FSDP, or the user.

        with CommDebugMode() as comms:
            loss = model(x).sum()
        assert comms.get_comm_counts() == {"all_reduce": 1}

    It observes the one function that all collectives pass, so compiled and functional ones are counted as well.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def __enter__(self) -> Self:
        self._counts.clear()
        self._bytes.clear()
        self._world = current_world("CommDebugMode")
        self._world.add_observer(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._world.remove_observer(self)

    def get_comm_counts(self) -> dict[str, int]:
        """The number of calls of each operation, such as {"all_reduce": 2}."""
        return dict(self._counts)

    def get_total_counts(self) -> int:
        """The number of collectives in all."""
        return self._counts.total()

    def get_comm_bytes(self) -> dict[str, int]:
        """Bytes of this rank's inputs, by operation."""
        return dict(self._bytes)

    def get_total_bytes(self) -> int:
        """Bytes of this rank's inputs in all."""
        return self._bytes.total()

    def __str__(self) -> str:
        """A table, one operation per line."""
        rows = [("operation", "calls", "bytes")]
        rows += [(name, f"{count:,}", f"{self._bytes[name]:,}") for name, count in sorted(self._counts.items())]
        rows.append(("all", f"{self.get_total_counts():,}", f"{self.get_total_bytes():,}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            f"{name:<{widths[0]}}  {calls:>{widths[1]}}  {size:>{widths[2]}}" for name, calls, size in rows
        )

    def enqueued(self, call: Call) -> None:
        self._counts[call.operation] += 1
        self._bytes[call.operation] += sum(tensor.nbytes for tensor in call.inputs)

    def completed(self, call: Call, error: DisttrainError | None) -> None:
        """Nothing more is to be seen then."""
