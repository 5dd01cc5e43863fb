"""Forgets what was queued while a step was recorded as a CUDA graph, where the recording has failed.

No GPU has gathered, computed or reduced any of it, and events of a recording can't be waited for. So nothing is waited
for here: what is gathered counts as sharded, whoever had asked for it, and gradients that are under way are dropped.
The order that was learnt before stays, since all ranks have to prefetch alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from disttrain.fsdp2.state import ShardState


def forget_recording(state: ShardState) -> None:
    """Have the modules of `state` sharded, and if it is a root's, its iteration not begun."""
    for group in state.groups:
        group.forget_run()
    state.unit.forget_run()
    state.forget_forward()
    if state.context is not None and state.unit.is_root:
        state.context.forget_run()
