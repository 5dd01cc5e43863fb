"""What a collective costs the host: each call under the transport without peers, ours and torch's, in turn.

    python benchmarks/collectives.py [--json FILE]

torch's twin is its FakeProcessGroup.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed
from harness import OURS, TORCH, command_line, finish, in_turns, row
from without_peers import without_peers

import disttrain

NUM_ROUNDS = 60
NUM_CALLS = 1000
WORLD_SIZE = 8


def round_us(call: Callable[[], object]) -> float:
    """Microseconds per call."""
    start_s = time.perf_counter()
    for _ in range(NUM_CALLS):
        call()
    return (time.perf_counter() - start_s) / NUM_CALLS * 1e6


def cases() -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Name -> our call, torch's call."""
    theirs = torch.distributed
    # Newer torch warns on each call of the old names, which would be measured too.
    their_gather = getattr(theirs, "all_gather_single", theirs.all_gather_into_tensor)
    their_scatter = getattr(theirs, "reduce_scatter_single", theirs.reduce_scatter_tensor)
    part, whole = torch.ones(4), torch.ones(4 * WORLD_SIZE)
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
            lambda: disttrain.all_to_all_single(whole, whole),
            lambda: theirs.all_to_all_single(whole, whole),
        ),
        "all_gather of 8": (lambda: disttrain.all_gather(parts, part), lambda: theirs.all_gather(parts, part)),
        "barrier": (disttrain.barrier, theirs.barrier),
    }


def main() -> None:
    options = command_line(__doc__).parse_args()
    warnings.simplefilter("ignore", FutureWarning)
    with without_peers(WORLD_SIZE):
        rows = [
            row(name, "us", in_turns({OURS: partial(round_us, ours), TORCH: partial(round_us, theirs)}, NUM_ROUNDS))
            for name, (ours, theirs) in cases().items()
        ]
    finish(rows, options.json)


if __name__ == "__main__":
    main()
