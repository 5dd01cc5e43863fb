"""A barrier that names absent ranks: ranks sign in the store; the first whose timeout ends asks for all who has not."""

from __future__ import annotations

from typing import Final

from disttrain.errors import CollectiveTimeoutError, StoreTimeoutError
from disttrain.process_group.backends import CompletedWork
from disttrain.process_group.current import called_group
from disttrain.process_group.door import issue
from disttrain.process_group.group import ProcessGroup
from disttrain.store import PrefixStore
from disttrain.store.attendance import absent, once
from disttrain.store.durations import Duration, seconds_or_none_at_all
from disttrain.store.rank_runs import from_runs, in_words, to_runs

_NOBODY: Final = "nobody"


def monitored_barrier(
    group: ProcessGroup | None = None, timeout: Duration | None = None, wait_all_ranks: bool = False
) -> None:
    """Return once every rank of the group is here; otherwise every rank that came raises and names those that did not.

    Needs the store alone, no transport, so it also says who is gone when a transport hangs. All absent ranks are named
    in any case; with `wait_all_ranks` in torch's words as well. A timeout of nothing is one of a millisecond.
    Raises: CollectiveTimeoutError after `timeout` (default: the group's).
    Collective: every rank of the group, in the same order.
    """
    if (group := called_group("monitored_barrier", group)) is None:
        return
    timeout_s = group.timeout_s if timeout is None else seconds_or_none_at_all("monitored_barrier", timeout)
    issue(group, "monitored_barrier", _sign_and_wait, (group, timeout_s, wait_all_ranks), (), (), False)


def _sign_and_wait(group: ProcessGroup, timeout_s: float, names_all: bool) -> CompletedWork:
    store = PrefixStore(f"{group.group_name}/monitored/{group.sequence}", group.world.store)
    store.set(f"rank/{group.world.rank}", b"")
    if store.add("num_ranks", 1) == group.group_size:
        store.compare_set("absent", "", _NOBODY)
    try:
        store.wait(["absent"], timeout_s)
    except StoreTimeoutError:
        # The first verdict holds, so that all ranks that came say the same.
        once(store, "absent", lambda: to_runs(absent(store, "rank/", group.ranks)) or _NOBODY)
    verdict = store.get("absent").decode()
    if verdict != _NOBODY:
        missing = from_runs(verdict)
        raise CollectiveTimeoutError(
            "monitored_barrier",
            f"ranks {in_words(sorted(missing))} did not come within {timeout_s:g} s. "
            f"({_in_torchs_words(group, missing if names_all else missing[:1], timeout_s)})",
            "Look for a rank that died, hangs, or takes another branch.",
            rank=group.world.rank,
            where=f"group {group.group_name}, ranks {group.ranks_text()}, sequence {group.sequence}",
        )
    # The ranks that came remove their keys; after a failure, the verdict stays for late ranks.
    store.delete_key(f"rank/{group.world.rank}")
    if store.add("num_gone", 1) == group.group_size:
        for key in ("num_ranks", "num_gone", "absent", "absent/tries/0"):
            store.delete_key(key)
    return CompletedWork()


def _in_torchs_words(group: ProcessGroup, absent: list[int], timeout_s: float) -> str:
    """The problem in the words of torch's errors, where the first rank waits for all, and the others for its answer."""
    rank, first = group.world.rank, group.members[0]
    if rank != first:
        return (
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
            f"rank {first}"
        )
    who = f"Rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"
    after = f"{timeout_s * 1000:g} ms"
    return f"Rank {rank} timed out in monitoredBarrier after {after}: {who} failed to pass monitoredBarrier in {after}"
