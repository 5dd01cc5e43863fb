"""Ranks that have left the job, in the store: each says how far it came in each of its groups.

They say so on pages, a key for each 64 ranks, and one key names the pages that there are. So a job that ends writes as
much as it has ranks, where a single key, which grew with each, would be copied as often; and who waits reads no more
than it takes to find a member that cannot come.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from disttrain.process_group.interfaces import GroupLike
    from disttrain.store.base import Store

RANKS_PER_PAGE: Final = 64
_PAGES_AT_ONCE: Final = 8
_PAGES: Final = "left"


def say_left(store: Store, rank: int, come_to: Mapping[str, int]) -> None:
    """`rank` leaves; `come_to` has its last collective of each group. Raises StoreError."""
    page = rank // RANKS_PER_PAGE
    store.append(f"{_PAGES}/{page}", json.dumps([rank, come_to]) + "\n")
    if store.add(f"{_PAGES}/{page}/num", 1) == 1:
        store.append(_PAGES, f"{page}\n")


def members_left(group: GroupLike) -> dict[int, int]:
    """Members that have left the job, each with the last collective of `group` that it came to."""
    return {rank: come_to for page in pages_left(group) for rank, come_to in page.items()}


def pages_left(group: GroupLike) -> Iterator[dict[int, int]]:
    """The same, some pages at a time; who has found enough asks for no more. Raises StoreError."""
    store = group.world.store
    if not store.check([_PAGES]):
        return
    pages = sorted({int(page) for page in store.get(_PAGES).split()})
    if group.group_size < len(pages) * RANKS_PER_PAGE:
        pages_of_group = {rank // RANKS_PER_PAGE for rank in group.members}
        pages = [page for page in pages if page in pages_of_group]
    for first in range(0, len(pages), _PAGES_AT_ONCE):
        texts = store.multi_get([f"{_PAGES}/{page}" for page in pages[first : first + _PAGES_AT_ONCE]])
        lines = [json.loads(line) for text in texts for line in text.splitlines()]
        yield {rank: come_to.get(group.group_name, 0) for rank, come_to in lines if rank in group.members}
