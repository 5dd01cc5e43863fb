"""What each worker of a job with a fault runs: steps that all ranks take together, as training does, without torch.

A rank that does not come is missed by the others within STEP_S, as a collective's timeout would have it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

from disttrain.store import PrefixStore, TCPStore

START_S = 30.0
STEP_S = 3.0
PAUSE_S = 0.01


def fail(action: str) -> None:
    match action:
        case "exit 3":
            os._exit(3)
        case "exit 0":
            os._exit(0)
        case "raise":
            raise ValueError("bad batch")
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "hang":
            time.sleep(1000)


def main() -> None:
    task = json.loads(sys.argv[1])
    rank, num_ranks, number = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "DISTTRAIN_ROUND"))
    if task["has_children"]:
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    host, port = os.environ["DISTTRAIN_STORE"].partition(",")[0].rsplit(":", 1)
    store = PrefixStore(f"round-{number}", TCPStore(host, int(port), timeout=START_S))
    for step in range(task["num_steps"]):
        if (rank, step, number) == (task["rank"], task["step"], 0):
            fail(task["action"])
        store.barrier("step", num_ranks, STEP_S if step else START_S)
        if step == 0:
            print("ready", rank, flush=True)
        time.sleep(PAUSE_S)
    print("done", rank, flush=True)


if __name__ == "__main__":
    main()
