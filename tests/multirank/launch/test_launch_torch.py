"""Scripts written for torch.distributed and torchrun run as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.multirank.launch.conftest import Launches


def test_a_plain_torch_distributed_script_runs_unchanged_and_meets_anew(forked_launches: Launches) -> None:
    script = forked_launches.script("""
        import os
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        sizes = torch.full((3,), float(dist.get_rank() + 1))
        dist.all_reduce(sizes)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 0:
            os._exit(3)  # and torch's store with it: its port need not be free again at once
        dist.barrier()
        print(sizes.tolist(), dist.is_torchelastic_launched())
        dist.destroy_process_group()
    """)
    ended = forked_launches.run("--nproc-per-node", "2", "--max-restarts", "1", script)
    assert (ended.exit_code, sorted(ended.lines)) == (0, [f"[rank {rank}] [3.0, 3.0, 3.0] True" for rank in (0, 1)])
