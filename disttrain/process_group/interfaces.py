"""Protocols of groups and of the world for the layers below them: observers, watchers, handles of collectives.

`ProcessGroup` and `World` are built from those, and satisfy these protocols; nothing checks it but type checkers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from disttrain._python.thread_errors import ThreadErrors
from disttrain.ranks import Ranks
from disttrain.store import Store
from disttrain.store.responder import Responder


class GroupLike(Protocol):
    """Ranks that call collectives together, and how far this one has come; `ProcessGroup` says more of each."""

    group_name: str
    members: Ranks
    group_rank: int
    group_size: int
    timeout_s: float
    sequence: int
    last_operation: str
    waiting_in: int
    num_refused: dict[int, int]
    axis_name: str
    spans_hosts: bool | None

    @property
    def world(self) -> WorldLike: ...

    @property
    def ranks(self) -> tuple[int, ...]: ...

    @property
    def coalesced(self) -> Sequence[object] | None: ...

    @property
    def backend_name(self) -> str: ...

    @property
    def asks_witnesses(self) -> bool: ...

    @property
    def is_connecting(self) -> bool: ...

    @property
    def come_to(self) -> tuple[int, str]: ...

    @property
    def ended_by(self) -> str: ...

    def find_reason(self) -> str: ...

    def serves(self, device_type: str) -> bool: ...

    def ranks_text(self) -> str: ...

    def check(self) -> None: ...

    def end(self, reason: str) -> None: ...

    def give_up(self, operation: str, error: Exception) -> None: ...


class WorldLike(Protocol):
    """A rank's place in a job, and its ways to ask and to tell the others; `World` says more of each."""

    store: Store
    rank: int
    action: str
    module: str
    tells_host: bool
    witness: Responder | None
    recall: Callable[[str, int], dict[str, Any] | None]
    main_place: Callable[[], str]
    thread_errors: ThreadErrors | None

    @property
    def groups(self) -> Sequence[GroupLike]: ...

    def group_named(self, group_name: str) -> GroupLike | None: ...

    def become_witness(self) -> None: ...
