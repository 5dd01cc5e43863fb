"""The form in which the parameters of a group are gathered and reduced, and how many modules go together. Pure.

If each parameter is gathered directly into its place, no copy and no memory for one is needed, but each parameter needs
a collective of its own. Within a host this takes some time of processor and GPU. So large parameters are gathered in
place, and the others as one message. Between hosts each collective has a latency that grows with the number of ranks in
a ring. There a group is gathered as one message, except parameters so large that a copy takes longer than the latency.
Small modules that run one after the other share a message.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ALIGNMENT_BYTES = 16
"""The alignment of a parameter's or group's data among bytes of several dtypes: a multiple of each dtype's size."""
COPY_BYTES_PER_S = 1e12
"""The speed at which a GPU copies gathered values into their places; reading and writing, an H100 moves 3e12 bytes a
second."""
HOST_COLLECTIVE_S = 20e-6
"""The time of one more collective in a launch within a host, for processor and GPU (two H100: one message is faster
where matrices have 2048 columns, in place where they have 4096)."""
TOGETHER_BYTES = 256 * 2**20
"""The largest size of modules that are gathered together, since two such sets are in memory at a time."""
PART_BYTES = 32 * 2**20
"""Smaller parts of a root get no reduction of their own, and join the next part in backward."""
_FEW_LATENCIES = 8
"""Messages that take longer than this many latencies are sent by themselves."""


@dataclass(frozen=True)
class TransferCost:
    """Seconds that a gather takes over a group: `latency_s`, and what is gathered over `bytes_per_s`."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: int) -> float:
        """Of one gather of so many bytes, all ranks' together."""
        return self.latency_s + num_bytes / self.bytes_per_s


def plan_form(whole_bytes: Sequence[int], form: str | None, cost: TransferCost | None) -> tuple[bool, ...]:
    """Chooses the parameters of a group, of so many bytes, that go right into their places. `form` is what the user
    asks for.

    `cost` is None where the group stays within a host, or nothing is known about its network.
    """
    num_params = len(whole_bytes)
    if form == "flat":
        return (False,) * num_params
    if form == "in_place" or (num_params == 1 and form is None):
        # A single parameter is gathered into its place without an additional collective.
        return (True,) * num_params
    if cost is None and form is None:
        return (sum(whole_bytes) / COPY_BYTES_PER_S > num_params * HOST_COLLECTIVE_S,) * num_params
    latency_s = HOST_COLLECTIVE_S if cost is None else cost.latency_s
    return tuple(num_bytes / COPY_BYTES_PER_S > latency_s for num_bytes in whole_bytes)


def may_go_together(num_bytes: int, asked: int | None, costs: Iterable[TransferCost | None]) -> bool:
    """True where a module of so many bytes is gathered or reduced with others. `costs` are those over the ranks that
    share its parameters, and over those that hold copies."""
    if asked is not None:
        return asked > 1
    most = (_FEW_LATENCIES * cost.latency_s * cost.bytes_per_s for cost in costs if cost is not None)
    return num_bytes <= max(most, default=0.0)


def reduce_buckets(children: Sequence[int], num_bytes: Sequence[int]) -> list[list[int]]:
    """Groups parameters of a root, of so many bytes and held by these of its children, that are reduced as one before
    its backward ends: the last child's first, as backward reaches them. Children are put together until a bucket is
    large."""
    parts: list[list[int]] = [[]]
    part_bytes, last_child = 0, None
    for index in sorted(range(len(children)), key=lambda index: -children[index]):
        if part_bytes >= PART_BYTES and children[index] != last_child:
            parts.append([])
            part_bytes = 0
        parts[-1].append(index)
        part_bytes += num_bytes[index]
        last_child = children[index]
    return parts


def reduces_in_place(forms: Sequence[Sequence[bool]]) -> bool:
    """True where several groups, whose parameters are gathered so, reduce together in place: where all of them are.
    Else it is one message."""
    return all(all(form) for form in forms)


def plan_together(whole_bytes: Sequence[int], asked: int | None, cost: TransferCost | None) -> list[int]:
    """Counts the modules that are gathered as one, set by set, of those that run one after the other and have so many
    bytes each.

    With k of n modules in a set a step takes n / k latencies, and waits for a set's bytes before its first module runs
    and after its last: the sum is least for k = sqrt(n * latency * bandwidth / (2 * bytes of a module)).
    """
    num_modules, total = len(whole_bytes), sum(whole_bytes)
    if num_modules < 2 or (asked is None and (cost is None or not total)):
        return [1] * num_modules
    if asked is not None:
        size = asked
    else:
        assert cost is not None
        mean = total / num_modules
        best = math.sqrt(num_modules * cost.latency_s * cost.bytes_per_s / (2 * mean))
        size = min(round(best), int(TOGETHER_BYTES // mean))
    num_sets = math.ceil(num_modules / max(1, size))
    # Sets of sizes that differ by one at most.
    return [num_modules * (index + 1) // num_sets - num_modules * index // num_sets for index in range(num_sets)]
