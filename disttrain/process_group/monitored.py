"""A barrier that knows who is absent: ranks sign a list in the store, and the first to lose patience reads it out."""

from __future__ import annotations

import json

from disttrain.durations import Duration, seconds
from disttrain.errors import CollectiveTimeoutError, StoreTimeoutError
from disttrain.process_group.backends import CompletedWork
from disttrain.process_group.current import resolve_group
from disttrain.process_group.door import issue
from disttrain.process_group.group import ProcessGroup
from disttrain.store import PrefixStore


def monitored_barrier(
    group: ProcessGroup | None = None, timeout: Duration | None = None, wait_all_ranks: bool = False
) -> None:
    """Return once every rank of the group is here; otherwise every rank that came raises and names those that did not.

    Needs the store alone, no transport, so it also says who is gone when a transport hangs. All absent ranks are named
    in any case; `wait_all_ranks` is taken for torch's sake.
    Raises: CollectiveTimeoutError after `timeout` (default: the group's).
    Collective: every rank of the group, in the same order.
    """
    group = resolve_group("monitored_barrier", group)
    timeout_s = group.timeout_s if timeout is None else seconds("monitored_barrier", timeout)
    issue(group, "monitored_barrier", _sign_and_wait, (group, timeout_s), (), (), False)


def _sign_and_wait(group: ProcessGroup, timeout_s: float) -> CompletedWork:
    store = PrefixStore(f"{group.group_name}/monitored/{group.sequence}", group.world.store)
    store.set(f"rank/{group.world.rank}", b"")
    if store.add("num_ranks", 1) == group.group_size:
        store.compare_set("absent", "", "[]")
    try:
        store.wait(["absent"], timeout_s)
    except StoreTimeoutError:
        absent = [rank for rank in group.ranks if not store.check([f"rank/{rank}"])]
        # The first verdict holds, so that all ranks that came say the same.
        store.compare_set("absent", "", json.dumps(absent))
    absent = json.loads(store.get("absent"))
    if absent:
        raise CollectiveTimeoutError(
            "monitored_barrier",
            f"ranks {', '.join(map(str, absent))} did not come within {timeout_s:g} s.",
            "Look for a rank that died, hangs, or takes another branch.",
            rank=group.world.rank,
            where=f"group {group.group_name}, ranks {group.ranks_text()}, sequence {group.sequence}",
        )
    # The ranks that came leave nothing behind; after a failure, the verdict waits for those that come late.
    store.delete_key(f"rank/{group.world.rank}")
    if store.add("num_gone", 1) == group.group_size:
        for key in ("num_ranks", "num_gone", "absent"):
            store.delete_key(key)
    return CompletedWork()
