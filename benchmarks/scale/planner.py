"""The planner on jobs that others have run: how long it plans, and the MFU that it expects of their mesh and of its own
choice beside what they have published."""

from __future__ import annotations

import time

from harness import OURS, Row, row
from plans.published import JOBS

from disttrain.plan import find_plans, plan_of


def rows(quick: bool) -> list[Row]:
    found = []
    for published in JOBS[:2] if quick else JOBS:
        job = published.job
        began_s = time.process_time()
        plans = find_plans(job, num_plans=5).plans
        planning_s = time.process_time() - began_s
        found.append(row(f"planning {published.name}", "s of CPU", {OURS: [planning_s]}))
        shares = {
            OURS: [plan_of(job, published.choice).utilization(job)],
            "own choice": [plan.utilization(job) for plan in plans[:1]] or [0.0],
            "published": [published.utilization],
        }
        found.append(row(f"MFU of {published.name}", "%", shares, scale=100))
    return found[1::2] + found[::2]
