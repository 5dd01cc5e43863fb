"""After a timeout: where are the others?

Each rank whose transports cannot say it has a witness, a thread that waits in the store for somebody to ask, and
answers with how far the rank has come in each of its groups. Who came is then known and not guessed, also when the
other rank only computes for too long. It costs nothing until someone asks.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from disttrain.errors import StoreError, StoreTimeoutError
from disttrain.store import PrefixStore, Store

if TYPE_CHECKING:
    from disttrain.process_group.group import ProcessGroup

Progress = dict[str, tuple[int, str]]
"""By group: the sequence number of the last collective issued, and its name."""

_ANSWER_S = 2.0
"""How long the others may take to answer."""
_IDLE_S = 3600.0
_MAX_NAMED = 8


class Witness:
    """Answers for this rank, from a thread of its own over a connection of its own, until it is closed."""

    def __init__(self, store: Store, rank: int, progress: Callable[[], Progress]) -> None:
        self._store = PrefixStore("roll_call", store).clone()
        self._rank = rank
        self._progress = progress
        self._number = 1
        self._thread = threading.Thread(target=self._answer_until_closed, name="disttrain witness", daemon=True)
        self._thread.start()

    def ask(self, ranks: tuple[int, ...]) -> dict[int, Progress]:
        """The answers of those of `ranks` that are alive and reachable, within two seconds or so."""
        number = self._number
        answers: dict[int, Progress] = {}
        try:
            self._store.set(f"{number}", b"asked")
            keys = {rank: f"{number}/{rank}" for rank in ranks}
            try:
                self._store.wait(list(keys.values()), _ANSWER_S)
            except StoreTimeoutError:
                keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
            for rank, answer in zip(keys, self._store.multi_get(list(keys.values())), strict=True):
                answers[rank] = json.loads(answer)
        except StoreError:
            return answers  # without the store nobody can be asked
        return answers

    def close(self) -> None:
        self._store.close()
        self._thread.join(_ANSWER_S)

    def _answer_until_closed(self) -> None:
        while True:
            try:
                self._store.wait([f"{self._number}"], _IDLE_S)
                answer = json.dumps(self._progress())
                number, self._number = self._number, self._number + 1
                self._store.set(f"{number}/{self._rank}", answer)
            except StoreTimeoutError:
                continue
            except StoreError:
                return


def absent_text(group: ProcessGroup, sequence: int) -> str:
    """`: rank 1 is at sequence 4 (barrier), rank 2 does not answer`; empty when that cannot be told."""
    witness = group.world.witness
    if witness is None or not sequence:
        return ""
    answers = witness.ask(group.ranks)
    absent = []
    for rank in group.ranks:
        if rank not in answers:
            absent.append(f"rank {rank} does not answer")
            continue
        come_to, operation = answers[rank].get(group.group_name, (0, ""))
        if come_to < sequence:
            last = f"at sequence {come_to} ({operation})" if come_to else "at no collective of the group yet"
            absent.append(f"rank {rank} is {last}")
    if not absent:
        return ": all ranks came, but not all in time"
    more = f", and {len(absent) - _MAX_NAMED} more ranks" if len(absent) > _MAX_NAMED else ""
    return f": {', '.join(absent[:_MAX_NAMED])}{more}"
