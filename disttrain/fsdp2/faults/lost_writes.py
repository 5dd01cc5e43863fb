"""Finds writes to gathered parameters, which would be lost.

Within its own forward a module has the gathered parameters. They are freed afterwards, and a write to them does not
reach the shards, where a plain module would keep it. So it is refused.

torch's operators count their writes. Writes through `.data`, or by other libraries, change nothing but the values, so
digests of the values are compared. Digests read memory and wait for the device, so they are taken only in the first two
forwards of each module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch

from disttrain.dtensor.views.data import num_data_writes
from disttrain.errors import ShardingError
from disttrain.fsdp2._torch import plain_memory
from disttrain.fsdp2.faults.lone_errors import tell_of
from disttrain.fsdp2.machine.unit import free
from disttrain.fsdp2.runner import run

if TYPE_CHECKING:
    from disttrain.fsdp2.params.param_group import ParamGroup


_NUM_WITH_DIGESTS = 2
"""Forwards: who writes to a parameter does so in each, as a rule."""
_SMALL_ELEMENTS = 1 << 12
_LONG_ROW = 16
_STEPS = (1, 2, 3, 5, 7)


def note_values(groups: Sequence[ParamGroup]) -> None:
    """A forward begins: what is written to gathered parameters from now on would be lost."""
    refuse_writes_on_request(groups)
    for group in groups:
        shown = group.shown
        shown.note_values()
        shown.num_data_writes = num_data_writes([param.sharded for param in group.params])
        shown.num_forwards += 1
        shown.digests = _digests(group) if shown.num_forwards <= _NUM_WITH_DIGESTS else None


def note_request(groups: Sequence[ParamGroup]) -> None:
    """The user has asked for the gathered parameters, and has them now."""
    for group in groups:
        group.shown.note_values()
        group.shown.is_on_request = True


def refuse_writes_on_request(groups: Sequence[ParamGroup]) -> None:
    """Raise ShardingError where what the user has asked for has been written to, by a forward or until it is freed."""
    for group in groups:
        if not group.shown.is_on_request:
            continue
        group.shown.is_on_request = False
        names = group.shown.written() if group.state.is_unsharded else []
        if names:
            _refuse(group, names, "unshard", "has been written to after unshard()")


def written_since(groups: Sequence[ParamGroup]) -> list[tuple[ParamGroup, list[str]]]:
    """Returns the gathered parameters that have been written to since the forward began, before they are freed."""
    of_each = [(group, group.shown.written() or _written_without_a_trace(group)) for group in groups]
    return [(group, names) for group, names in of_each if names]


def _written_without_a_trace(group: ParamGroup) -> list[str]:
    noted, group.shown.digests = group.shown.digests, None
    now = None if noted is None else _digests(group)
    if noted is None or now is None or noted[0] != now[0]:
        return []
    are_same = [torch.equal(digest, other) for digest, other in zip(noted[1], now[1], strict=True)]
    return [param.fqn for param, is_same in zip(group.params, are_same, strict=True) if not is_same]


def _digests(group: ParamGroup) -> tuple[tuple[int, ...], list[torch.Tensor]] | None:
    """Returns the parameters that were gathered, and digests of them; None where there are no values to be read."""
    if not group.state.is_unsharded or (group.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return None
    unsharded = [plain_memory(param.unsharded) for param in group.params]
    values = [parameter for parameter in unsharded if parameter is not None]
    if len(values) < len(unsharded):
        return None
    with torch.no_grad():
        return group.gathered, [_digest(parameter) for parameter in values]


def _digest(values: torch.Tensor) -> torch.Tensor:
    """Small tensors are copied. Of others, the bits are summed as integers along rows and at a stride, so that
    positions count too. Nothing is cast, since that would take the memory of a copy."""
    if values.numel() <= _SMALL_ELEMENTS:
        return values.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
    data = values.contiguous().view(-1).view(torch.uint8)
    num_whole = data.numel() // 8 * 8
    numbers = (data[:num_whole] if data.storage_offset() % 8 == 0 else data[:num_whole].clone()).view(torch.int64)
    sums = [numbers[:: min(step, numbers.numel())].sum()[None] for step in _STEPS]
    num_rows = values.shape[0]
    if num_whole == data.numel() and numbers.numel() % num_rows == 0 and numbers.numel() >= _LONG_ROW * num_rows:
        sums.append(numbers.view(num_rows, -1).sum(-1))
    return torch.cat([*sums, data[num_whole:].long()])


def refuse_writes(written: Sequence[tuple[ParamGroup, list[str]]], kind: str) -> None:
    """Raise ShardingError where gathered parameters of a module, of this `kind`, have been written to.

    If only one rank has written, only it raises, and it tells the others.
    """
    for group, names in written:
        _refuse(group, names, "forward", f"of this {kind} has been written to in its forward")


def _refuse(group: ParamGroup, names: Sequence[str], operation: str, when: str) -> NoReturn:
    # If `.data` was replaced, the next gather cannot use their memory.
    run(free(group.state))
    group._unsharded = None
    error = ShardingError(
        operation,
        f"{', '.join(names[:3])} {when}, where parameters are gathered ones: what was written would be lost when they"
        " are freed.",
        "Write to parameters between forwards, where they are the shards, or keep this one out of fully_shard"
        " by ignored_params (as of nn.Embedding with max_norm).",
        rank=group.sharding.mesh.get_rank(),
    )
    tell_of(operation, error, [group])
    raise error
