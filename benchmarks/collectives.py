"""What a collective costs the host: each call under the transport without peers, ours and torch's, in turn.

    python benchmarks/collectives.py [--json FILE]

Rounds of ours and torch's alternate, so that both see the same machine; medians of all rounds with their quartiles, and
the ratio of the medians. torch's twin is its FakeProcessGroup.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

import disttrain
from disttrain.process_group import World, entered_world
from disttrain.store import HashStore

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


def measure(ours: Callable[[], object], theirs: Callable[[], object]) -> dict[str, float]:
    rounds: tuple[list[float], list[float]] = ([], [])
    for _ in range(NUM_ROUNDS):
        for call, times_us in zip((ours, theirs), rounds, strict=True):
            times_us.append(round_us(call))
    found = {}
    for name, times_us in zip(("ours", "torch"), rounds, strict=True):
        lower, median, upper = statistics.quantiles(times_us, n=4)
        found |= {
            f"{name}_us": median,
            f"{name}_lower_us": lower,
            f"{name}_upper_us": upper,
            f"{name}_best_us": min(times_us),
        }
    return found | {"ratio": found["ours_us"] / found["torch_us"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the results to this file too")
    options = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    world = World(HashStore(), 0, WORLD_SIZE, backend="fake", timeout_s=1.0, device=torch.device("cpu"))
    results: dict[str, object] = {
        "command": " ".join(sys.argv),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "versions": f"disttrain {disttrain.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
    }
    with entered_world(world):
        for name, (ours, theirs) in cases().items():
            found = results[name] = measure(ours, theirs)
            print(
                f"{name:28} {found['ours_us']:6.2f} us [{found['ours_lower_us']:.2f}, {found['ours_upper_us']:.2f}]"
                f"   torch {found['torch_us']:6.2f} us [{found['torch_lower_us']:.2f}, {found['torch_upper_us']:.2f}]"
                f"   {found['ratio']:.2f}   best {found['ours_best_us']:.2f} / {found['torch_best_us']:.2f}"
            )
    torch.distributed.destroy_process_group()
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
