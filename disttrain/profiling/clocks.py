"""The clock that the parts of a trace have in common: rank 0's."""

from __future__ import annotations

import threading
import time
from typing import Final

from disttrain.errors import StoreError
from disttrain.store import Store
from disttrain.store.clock import ask_clock, own_boot, serve_clock

_NS_PER_S: Final = 1e9
_ASKED_S: Final = 10.0


class CommonClock:
    """`start_ns`, where the trace's times begin, alike on all ranks; `shift_ns`, what is to be added to this rank's
    clock to have rank 0's; None where nobody knows.

    Rank 0 tells the time to others on a thread, and they ask on one, as soon as all have begun: later, when ranks read
    what they have recorded, rank 0's thread would come too late to answer well. Ranks on one machine have one clock.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store.listener()
        self._shift_s: float | None = 0.0 if rank == 0 else None
        self.start_ns = int(store.compare_set("start", "", str(time.time_ns())))
        boot = own_boot()
        if rank == 0:
            store.set("boot", boot)
        self._asking = threading.Thread(
            target=self._ask if rank else self._serve, args=(boot,), name="disttrain profile clock", daemon=True
        )
        self._is_asking = rank > 0
        self._asking.start()

    @property
    def shift_ns(self) -> int | None:
        """See the class; waits for what is under way, for some seconds at most."""
        if self._is_asking:
            self._asking.join(_ASKED_S)
        return None if self._shift_s is None else round(self._shift_s * _NS_PER_S)

    def close(self) -> None:
        """Neither tell nor ask any more."""
        self._store.close()
        self._asking.join(1.0)

    def _serve(self, _: str) -> None:
        serve_clock(self._store)

    def _ask(self, boot: str) -> None:
        try:
            if boot and self._store.get("boot").decode() == boot:
                self._shift_s = 0.0
            elif (answer := ask_clock(self._store)) is not None:
                self._shift_s = answer[0]
        except StoreError:
            pass  # rank 0 is gone, or this rank: nobody will know
