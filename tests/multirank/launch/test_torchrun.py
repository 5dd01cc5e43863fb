"""Scripts on disttrain run under torch's launcher, which keeps a store of its own at the job's address."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

from tests.surroundings.launching import FORK_CLIENT, environment

if TYPE_CHECKING:
    from tests.forkserver.process import ForkServer

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def test_ranks_meet_in_a_store_with_a_token_of_its_own_and_again_when_started_again(
    tmp_path: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = """
            import os
            import torch
            import disttrain
            from disttrain.errors import StoreAuthError
            from disttrain.store import TCPStore

            assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
            attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
            for _ in range(2):
                disttrain.init_process_group(timeout=240)
                total = torch.tensor([disttrain.get_rank() + 1.0])
                disttrain.all_reduce(total)
                if attempt == "0" and disttrain.get_rank() == 1:
                    os._exit(3)
                opened = disttrain.current_world()._owned_store
                try:
                    TCPStore(opened.host, opened.port, timeout=60, wait_for_workers=False).get("anything")
                except StoreAuthError:
                    locked = True
                disttrain.barrier()
                disttrain.destroy_process_group()
            print(f"attempt {attempt} {total.item()} {locked}\\n", end="", flush=True)
        """
    Path("script.py").write_text(dedent(script))
    worker = (sys.executable, FORK_CLIENT, fork_server.address, "script.py")
    ended = fork_server.run(*TORCHRUN, "--max-restarts", "1", "--no-python", *worker, environ=environment())
    assert (ended.returncode, ended.stdout.splitlines()) == (0, ["attempt 1 3.0 True"] * 2), ended.stderr
