"""Scripts on disttrain run under torch's launcher, which keeps a store of its own at the job's address."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[3]
LIMIT_S = 100.0


def torchrun(folder: Path, *flags: str, script: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(dedent(script))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DISTTRAIN_")}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *flags, "script.py"],
        cwd=folder,
        env={**kept, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_ranks_meet_in_a_store_with_a_token_of_its_own_and_again_when_started_again(tmp_path: Path) -> None:
    ended = torchrun(
        tmp_path,
        "--standalone",
        "--max-restarts",
        "1",
        script="""
            import os
            import torch
            import disttrain
            from disttrain.errors import StoreAuthError
            from disttrain.store import TCPStore

            assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
            attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
            for _ in range(2):
                disttrain.init_process_group(timeout=60)
                total = torch.tensor([disttrain.get_rank() + 1.0])
                disttrain.all_reduce(total)
                if attempt == "0" and disttrain.get_rank() == 1:
                    os._exit(3)
                opened = disttrain.current_world()._owned_store
                try:
                    TCPStore(opened.host, opened.port, timeout=5, wait_for_workers=False).get("anything")
                except StoreAuthError:
                    locked = True
                disttrain.barrier()
                disttrain.destroy_process_group()
            print(f"attempt {attempt} {total.item()} {locked}\\n", end="", flush=True)
        """,
    )
    assert (ended.returncode, ended.stdout.splitlines()) == (0, ["attempt 1 3.0 True"] * 2), ended.stderr
