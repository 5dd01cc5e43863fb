"""With DISTTRAIN_DEBUG=detail the ranks compare what they are about to call, and nobody calls what doesn't fit.

Every rank appends its call to a list in the store; the last one to come compares them all and leaves the verdict, which
every rank reads: a few round trips to the store for each collective.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from disttrain.errors import CollectiveMismatchError, CollectiveTimeoutError, StoreTimeoutError
from disttrain.process_group._c10d import ReduceOp, reduction_kind
from disttrain.store import PrefixStore, Store
from disttrain.store.slices import in_slices

if TYPE_CHECKING:
    from disttrain.process_group.interfaces import GroupLike

Fields = dict[str, Any]

_ALIKE_OUTPUTS = frozenset({"all_gather", "scatter"})
"""Operations whose outputs are alike on all ranks, and whose inputs are not."""
_PAIRWISE = frozenset({"all_to_all", "all_to_all_single"})
"""Operations in which a rank's sizes are the others' sizes for that rank."""


def fields_of(
    operation: str,
    arguments: Sequence[Any],
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    peer_rank: int | None,
) -> Fields:
    """The fields of a call that must be alike on all ranks; and `sends` and `receives`, which must fit pairwise."""
    tensors = [*inputs, *outputs]
    fields: Fields = {
        "operation": operation,
        "device": tensors[0].device.type if tensors else None,
        "dtype": str(tensors[0].dtype).removeprefix("torch.") if tensors else None,
        "root": peer_rank,
        "reduction": next(
            (reduction_kind(a).name for a in arguments if isinstance(a, ReduceOp | ReduceOp.RedOpType)), None
        ),
    }
    if operation not in _PAIRWISE:
        alike = outputs if operation in _ALIKE_OUTPUTS else inputs
        fields["sizes"] = [list(tensor.shape) for tensor in alike]
    elif operation == "all_to_all":
        fields["sends"], fields["receives"] = [t.numel() for t in inputs], [t.numel() for t in outputs]
    else:
        _, _, receives, sends, _ = arguments
        fields["sizes"] = list(inputs[0].shape[1:])
        fields["sends"], fields["receives"] = list(sends), list(receives)
    return fields


def find_mismatch(calls: dict[int, Fields]) -> str:
    """The fields that don't fit, by rank; empty when all is well. `calls` has all members, in group order."""
    problems = []
    names = dict.fromkeys(name for fields in calls.values() for name in fields)
    for name in names:
        if name in {"sends", "receives"}:
            continue
        values: dict[str, list[int]] = {}
        for rank, fields in calls.items():
            values.setdefault(_shown(fields.get(name)), []).append(rank)
        if len(values) > 1:
            said = ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in values.items())
            problems.append(f"{name}: {said}")
    if not problems:
        members = list(calls.items())
        problems = [
            f"sizes: rank {sender} sends {sent['sends'][j]} to rank {receiver}, which expects {received['receives'][i]}"
            for i, (sender, sent) in enumerate(members)
            for j, (receiver, received) in enumerate(members)
            if "sends" in sent and sent["sends"][j] != received["receives"][i]
        ]
    return "; ".join(problems)


def compare_calls(
    group: GroupLike,
    operation: str,
    sequence: int,
    arguments: Sequence[Any],
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    peer_rank: int | None,
) -> None:
    """Return when all members are about to call the same.

    Raises, on every rank that has come: CollectiveMismatchError that names ranks and fields, CollectiveTimeoutError
    that names who did not come.
    """
    rank, store = group.world.rank, PrefixStore(f"{group.group_name}/calls/{sequence}", group.world.store)
    where = f"group {group.group_name}, ranks {group.ranks_text()}, sequence {sequence}"
    line = json.dumps([rank, fields_of(operation, arguments, inputs, outputs, peer_rank)])
    store.append("made", line + "\n")
    if store.add("num_made", 1) == group.group_size:
        calls = _calls_made(store)
        verdict = find_mismatch({member: calls[member] for member in group.ranks})
        store.set("verdict", verdict or "ok")
        store.delete_key("made")
        store.delete_key("num_made")
        if sequence > 1:
            # Whoever is here has read the verdict before this one.
            PrefixStore(f"{group.group_name}/calls/{sequence - 1}", group.world.store).delete_key("verdict")
    else:
        try:
            in_slices(["verdict"], lambda slice_s: store.wait(["verdict"], slice_s), group.timeout_s, group.check)
        except StoreTimeoutError:
            absent = sorted(set(group.ranks) - set(_calls_made(store)))
            raise CollectiveTimeoutError(
                operation,
                f"not every rank came within {group.timeout_s:g} s: {_ranks(absent)} did not.",
                "Look for a rank that died, hangs, or takes another branch.",
                rank=rank,
                where=where,
            ) from None
        verdict = store.get("verdict").decode()
        verdict = "" if verdict == "ok" else verdict
    if verdict:
        raise CollectiveMismatchError(
            operation,
            f"the ranks called different things: {verdict}.",
            "Make all ranks call the same, in the same order.",
            rank=rank,
            where=where,
        )


def _calls_made(store: Store) -> dict[int, Fields]:
    return dict(json.loads(line) for line in store.get("made").decode().splitlines())


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {','.join(map(str, ranks))}"
