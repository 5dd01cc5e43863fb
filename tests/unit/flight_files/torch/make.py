"""Makes such files with torch's own recorder, in the folder that it is given. Rank 1 does not come."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json


def run(rank: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29871", RANK=str(rank), WORLD_SIZE="2")
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    for _ in range(2):
        dist.all_reduce(torch.ones(4))
    if rank == 0:
        dist.all_reduce(torch.ones(4), async_op=True)
    time.sleep(2)
    (Path(folder) / f"nccl_trace_rank_{rank}").write_bytes(_dump_fr_trace())
    (Path(folder) / f"nccl_trace_rank_{rank}.json").write_bytes(_dump_fr_trace_json())
    os._exit(0)


if __name__ == "__main__":
    mp.spawn(run, (sys.argv[1],), nprocs=2)
