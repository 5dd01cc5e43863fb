"""A job that hangs on purpose, and says why: rank 1 waits for data that nobody sends, the others wait for rank 1.

    disttrain-launch --standalone --nproc-per-node 3 --log-dir logs examples/hang.py

After three seconds the flight recorder ends the job, and the launcher prints what it has found. Then, or with
`--forever` while the job hangs:

    disttrain-flight logs/flight --html hang.html
    disttrain-flight watch logs/flight
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

import disttrain
from disttrain.flight_recorder import StepSummaries, enable

STEPS = 200


def next_batch(step: int) -> torch.Tensor:
    if disttrain.get_rank() == 1 and step == STEPS - 1:
        reading, _ = os.pipe()
        os.read(reading, 1)  # the end of the road
    return torch.full((1024,), float(step))


def tell(summary: dict[str, Any]) -> None:
    late = max(summary["lateness_s"], key=summary["lateness_s"].get)
    print(
        f"step {summary['step']}: {1e3 * summary['step_s']:.1f} ms each on {summary['num_ranks']} ranks, "
        f"{summary['waiting_share']:.0%} of it waiting for communication; the latest is rank {late}",
        flush=True,
    )


def main() -> None:
    os.environ.setdefault("DISTTRAIN_FLIGHT_SOFT_LIMIT_S", "3")
    if "--forever" not in sys.argv:
        os.environ.setdefault("DISTTRAIN_FLIGHT_ENDS_JOB", "1")
    disttrain.init_process_group()
    summaries = StepSummaries(enable(), tell, every_steps=50)
    for step in range(STEPS):
        batch = next_batch(step)
        disttrain.all_reduce(batch)
        disttrain.barrier()
        summaries.step()
    disttrain.destroy_process_group()


if __name__ == "__main__":
    main()
