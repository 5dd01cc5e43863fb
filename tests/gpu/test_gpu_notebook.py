"""`disttrain.launch` where there are GPUs: forks use them, unless the process itself has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.surroundings.launching import LIMIT_S, environment

CODE = """
import torch
import disttrain

def compute():
    disttrain.init_process_group()
    x = torch.ones(2, device="cuda", requires_grad=True)
    (x * 3).sum().backward()
    disttrain.all_reduce(x.grad)
    return x.grad, torch.cuda.current_device()

torch.manual_seed(0)
torch.ones(2, requires_grad=True).sum()
"""
USED = "has used its GPUs, and no fork can use them then. Restart the kernel, and use GPUs in nothing but the function"


def _done(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    script = folder / "cell.py"
    script.write_text(CODE + code, encoding="utf-8")
    return subprocess.run(
        [sys.executable, script],
        env=environment(has_gpus=True),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_forks_use_gpus(tmp_path: Path) -> None:
    """Again and again."""
    done = _done(tmp_path, "for _ in range(2):\n    print(disttrain.launch(compute, nproc=1)[0][0].tolist())")
    assert (done.returncode, done.stdout) == (0, "[3.0, 3.0]\n" * 2), done.stderr


@pytest.mark.parametrize(
    "use", ["torch.ones(1).cuda()", "torch.cuda.is_available()", "torch.ones(2, requires_grad=True).sum().backward()"]
)
def test_a_process_that_has_used_its_gpus_is_told_so(use: str, tmp_path: Path) -> None:
    done = _done(tmp_path, f"{use}\ndisttrain.launch(compute, nproc=1)")
    assert done.returncode == 1
    assert USED in done.stderr.replace("\n", " ")
