"""The steps that an optimizer has taken: a number on the CPU for each parameter, as torch's optimizers keep them.

They are parts of one tensor, so that one operator counts all of them: an operator for each took half of the host's time
for a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import repeat
from operator import is_
from typing import Any

import torch

from disttrain.kernels._torch import add_one, base_of


def joined_steps(states: Sequence[dict[str, Any]]) -> torch.Tensor:
    """The steps of these states (n,), whose own are parts of it, in some order, from now on."""
    if (whole := _whole([state["step"] for state in states])) is not None:
        return whole
    counts = torch.stack([state["step"] for state in states])
    for state, count in zip(states, counts.unbind(), strict=True):
        state["step"] = count
    return counts


def count_steps(states: Sequence[dict[str, Any]]) -> list[int]:
    """Adds one to the step of each state, and returns them all."""
    alone = [state for state in states if base_of(state["step"]) is None]
    if len(alone) > 1:
        joined_steps(alone)
    steps = [state["step"] for state in states]
    if (whole := _whole(steps)) is not None:
        whole.add_(1)
        values = whole.tolist()
        return [int(values[step.storage_offset()]) for step in steps]
    parts: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    for step in steps:
        parts[id(base_of(step))].append(step)
    for some in parts.values():
        whole = _whole(some)
        if whole is not None:
            whole.add_(1)
        else:
            # Of the others there is no gradient.
            add_one(some)
    return [*map(int, steps)]


def _whole(steps: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensor that these are all parts of, if there is one."""
    whole = base_of(steps[0]) if steps else None
    if whole is None or len(whole) != len(steps):
        return None
    return whole if all(map(is_, map(base_of, steps), repeat(whole))) else None
