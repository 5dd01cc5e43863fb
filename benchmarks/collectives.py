"""What a collective costs the host: each call under the transport without peers, ours and torch's, in turn.

    python benchmarks/collectives.py [--rounds 60] [--depths 5 20 60] [--json FILE]

Ours is as jobs run it, with the flight recorder, and "unrecorded" without. Each call is made below a stack as deep as a
trainer's, of which the innermost eight frames are new each time, as those of a model's modules are; what these frames
take is measured in the same rounds and taken away. Figures are of this thread's CPU time. torch's counterpart is its
FakeProcessGroup.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed
from harness import OURS, TORCH, Row, command_line, finish, in_turns, row
from without_peers import UNRECORDED, below, unrecorded, without_peers

import disttrain

NUM_CALLS = 200
NUM_NEW_FRAMES = 8
WORLD_SIZE = 8
Call = Callable[[], object]


def round_us(call: Call, num_frames: int) -> float:
    """Microseconds of CPU time per call, each below frames of its own."""
    start_s = time.thread_time()
    for _ in range(NUM_CALLS):
        below(num_frames, call)
    return (time.thread_time() - start_s) / NUM_CALLS * 1e6


def cases() -> dict[str, tuple[Call, Call]]:
    """Name -> our call, torch's call."""
    theirs = torch.distributed
    # Newer torch warns on each call of the old names, which would be measured too.
    their_gather = getattr(theirs, "all_gather_single", theirs.all_gather_into_tensor)
    their_scatter = getattr(theirs, "reduce_scatter_single", theirs.reduce_scatter_tensor)
    part, whole, other = torch.ones(4), torch.ones(4 * WORLD_SIZE), torch.ones(4 * WORLD_SIZE)
    parts = [torch.ones(4) for _ in range(WORLD_SIZE)]
    return {
        "all_reduce": (lambda: disttrain.all_reduce(part), lambda: theirs.all_reduce(part)),
        "all_reduce, async and wait": (
            lambda: disttrain.all_reduce(part, async_op=True).wait(),
            lambda: theirs.all_reduce(part, async_op=True).wait(),
        ),
        "broadcast": (lambda: disttrain.broadcast(part, 0), lambda: theirs.broadcast(part, 0)),
        "all_gather_into_tensor": (
            lambda: disttrain.all_gather_into_tensor(whole, part),
            lambda: their_gather(whole, part),
        ),
        "reduce_scatter_tensor": (
            lambda: disttrain.reduce_scatter_tensor(part, whole),
            lambda: their_scatter(part, whole),
        ),
        "all_to_all_single": (
            lambda: disttrain.all_to_all_single(whole, other),
            lambda: theirs.all_to_all_single(whole, other),
        ),
        "all_gather of 8": (lambda: disttrain.all_gather(parts, part), lambda: theirs.all_gather(parts, part)),
        "barrier": (disttrain.barrier, theirs.barrier),
        "isend and wait": (lambda: disttrain.isend(part, 1).wait(), lambda: theirs.isend(part, 1).wait()),
        "batch_isend_irecv of 2": (
            lambda: exchange(disttrain, part, whole),
            lambda: exchange(theirs, part, whole),
        ),
        "4 all_reduce, coalesced": (
            lambda: together(disttrain, disttrain.coalescing_manager(async_ops=True), parts[:4]),
            lambda: together(theirs, theirs._coalescing_manager(device=part.device, async_ops=True), parts[:4]),
        ),
    }


def exchange(side: ModuleType, sent: torch.Tensor, received: torch.Tensor) -> None:
    """A message to the next rank, and one from the last."""
    messages = [side.P2POp(side.isend, sent, 1), side.P2POp(side.irecv, received, WORLD_SIZE - 1)]
    for work in side.batch_isend_irecv(messages):
        work.wait()


def together(side: ModuleType, manager: Any, tensors: list[torch.Tensor]) -> None:
    with manager as batch:
        for tensor in tensors:
            side.all_reduce(tensor)
    batch.wait()


def measured(name: str, depth: int, num_rounds: int, ours: Call, theirs: Call) -> Row:
    num_new = min(depth, NUM_NEW_FRAMES)
    timed = {side: partial(round_us, call, num_new) for side, call in {OURS: ours, TORCH: theirs}.items()}
    timed |= {UNRECORDED: unrecorded(timed[OURS]), "frames": partial(round_us, lambda: None, num_new)}
    taken = below(depth - num_new, lambda: in_turns(timed, num_rounds, num_warmups=2))
    frames_us = statistics.median(taken.pop("frames"))
    return row(
        f"{name}, {depth} deep",
        "us of CPU",
        {side: [each - frames_us for each in values] for side, values in taken.items()},
    )


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--depths", type=int, nargs="+", default=[5, 20, 60], metavar="FRAMES")
    options = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)
    with without_peers(WORLD_SIZE):
        rows = [
            measured(name, depth, options.rounds, *sides) for name, sides in cases().items() for depth in options.depths
        ]
    finish(rows, options.json)


if __name__ == "__main__":
    main()
