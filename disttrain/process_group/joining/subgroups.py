"""Several groups at once, under torch.distributed's names. None costs communication; each rank makes its own alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from disttrain.arguments import arguments_of
from disttrain.errors import GroupError
from disttrain.process_group.current import current_world, new_group, resolve_group
from disttrain.process_group.group import ProcessGroup
from disttrain.process_group.world import NON_GROUP_MEMBER, NonGroupMember, world_of
from disttrain.settings import LOCAL_WORLD_SIZE
from disttrain.store.durations import Duration

Made = ProcessGroup | NonGroupMember

_LISTS: Final = "Give a list for each group, of its ranks as numbers."


def new_subgroups(
    group_size: int | None = None,
    group: ProcessGroup | None = None,
    timeout: Duration | None = None,
    backend: str | None = None,
    pg_options: object | None = None,
    group_desc: str | None = None,
) -> tuple[Made, list[Made]]:
    """Cut `group` into neighbours: groups of `group_size` ranks each (default: the processes of a node).

    `group_desc` is taken for torch's sake and not used: groups are named by their ranks.
    Returns: this rank's group, and all of them, of which those without this rank are NON_GROUP_MEMBER.
    Raises: GroupError when the size doesn't divide the group's.
    """
    whole = resolve_group("new_subgroups", group)
    size = LOCAL_WORLD_SIZE.read() if group_size is None else group_size
    if not isinstance(size, int) or not size or size < 0 or whole.group_size % size:
        raise GroupError(
            "new_subgroups",
            f"group_size={size} does not divide the {whole.group_size} ranks of group {whole.group_name}.",
            "Give a divisor; without a launcher there is no default.",
            rank=whole.world.rank,
        )
    cuts = [whole.members[start : start + size] for start in range(0, whole.group_size, size)]
    return new_subgroups_by_enumeration(cuts, timeout, backend, pg_options, group_desc)


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: Duration | None = None,
    backend: str | None = None,
    pg_options: object | None = None,
    group_desc: str | None = None,
) -> tuple[Made, list[Made]]:
    """Groups of these global ranks, each in ascending order, of which no rank is in two.

    Returns, raises: as new_subgroups; the first is NON_GROUP_MEMBER on a rank that is in none.
    """
    return _subgroups("new_subgroups_by_enumeration", ranks_per_subgroup_list, timeout, backend, pg_options)


def _subgroups(
    operation: str,
    cuts: Sequence[Sequence[int]],
    timeout: Duration | None,
    backend: str | None,
    pg_options: object | None,
    *,
    sort_ranks: bool = True,
) -> tuple[Made, list[Made]]:
    with arguments_of(operation, current_world(operation).rank, _LISTS):
        every = [rank for ranks in cuts for rank in ranks]
        is_twice = len(set(every)) != len(every)
    if not every or is_twice:
        raise GroupError(
            operation,
            f"{[list(ranks) for ranks in cuts]} has no rank, or one rank twice.",
            "Name each rank in one group at most.",
            rank=current_world(operation).rank,
        )
    made = [new_group(ranks, timeout, backend, pg_options, sort_ranks=sort_ranks) for ranks in cuts]
    joined = next((group for group in made if group is not NON_GROUP_MEMBER), NON_GROUP_MEMBER)
    return joined, made


def split_group(
    parent_pg: ProcessGroup | None = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: Duration | None = None,
    pg_options: object | None = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> ProcessGroup | None:
    """Cut `parent_pg` along lists of its group ranks, each in the parent's order; a rank may be left out.

    Returns: this rank's group, None when it is in none. Raises: GroupError for ranks that are not in the parent.
    """
    parent = resolve_group("split_group", parent_pg)
    with arguments_of("split_group", parent.world.rank, _LISTS):
        group_cuts = [sorted(cut) for cut in split_ranks or ()]
        cuts = [[parent.members[parent.checked_group_rank("split_group", rank)] for rank in cut] for cut in group_cuts]
    joined = _subgroups("split_group", cuts, timeout, backend, pg_options, sort_ranks=False)[0]
    return joined if isinstance(joined, ProcessGroup) else None


def abort_process_group(group: ProcessGroup | None = None) -> None:
    """Let go of `group` (None: the default group) without waiting for anybody, from any thread.

    What waits on this rank in one of its collectives ends with BackendError: on NCCL at once, on Gloo within half a
    second, on Gloo's messages at their timeout. Other ranks notice by their own errors and timeouts, unless they abort
    too. The world stays: call destroy_process_group to leave it.
    """
    group = resolve_group("abort_process_group", group)
    world_of(group).abort_group(group)
