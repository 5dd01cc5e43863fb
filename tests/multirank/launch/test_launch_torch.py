"""Scripts written for torch.distributed and torchrun run as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.multirank.launch.conftest import Launches


def test_a_plain_torch_distributed_script_runs_unchanged(launches: Launches) -> None:
    script = launches.script("""
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        sizes = torch.full((3,), float(dist.get_rank() + 1))
        dist.all_reduce(sizes)
        print(sizes.tolist(), dist.is_torchelastic_launched())
        dist.destroy_process_group()
    """)
    ended = launches.run("--nproc-per-node", "2", script)
    assert (ended.exit_code, sorted(ended.lines)) == (0, [f"[rank {rank}] [3.0, 3.0, 3.0] True" for rank in (0, 1)])
