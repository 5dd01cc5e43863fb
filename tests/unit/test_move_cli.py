"""`python -m disttrain.move`, on a small tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from disttrain.move.cli import main

TRAIN = "import torch.distributed as dist\n\ndist.init_process_group()\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "train.py": TRAIN,
        "lib/model.py": "from torch.distributed.fsdp import StateDictType, fully_shard\n",
        "lib/plain.py": "import torch\n",
        "lib/latin.py": "# coding: latin-1\nimport torch.distributed as dist  # \xe4\n",
        "run.sh": "# torchrun train.py\ntorchrun --nproc-per-node 2 train.py\nexport TORCH_NCCL_DUMP_ON_TIMEOUT=1\n",
        "job.yaml": "command: [python, -m, torch.distributed.run, train.py]\n",
        ".git/hook.py": TRAIN,
        "venv/lib/torch.py": TRAIN,
        "venv/pyvenv.cfg": "",
        "notes.md": "torchrun\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    return tmp_path


def _texts(tree: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()}


def test_a_tree_moves_once(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = _texts(tree)
    assert main([str(tree)]) == 0
    after = _texts(tree)
    changed = {path.relative_to(tree).as_posix() for path in before if before[path] != after[path]}
    assert changed == {"train.py", "lib/model.py", "lib/latin.py"}
    assert after[tree / "train.py"] == TRAIN.replace("torch.distributed", "disttrain").encode()
    assert after[tree / "lib/latin.py"] == b"# coding: latin-1\nimport disttrain as dist  # \xe4\n"
    assert "3 files changed, of 6." in capsys.readouterr().out
    assert main([str(tree)]) == 0
    assert _texts(tree) == after
    assert "0 files changed, of 6." in capsys.readouterr().out


def test_what_is_left_is_a_table(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tree)]) == 0
    rows = [line.split("  ") for line in capsys.readouterr().out.partition("Left to you:\n")[2].splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells == [
        ["where", "what", "page", "why"],
        ["job.yaml:1", "torch.distributed.run", "docs/launching.md", "disttrain-launch takes the same flags"],
        ["run.sh:2", "torchrun", "docs/launching.md", "disttrain-launch takes the same flags"],
        [
            "run.sh:3",
            "TORCH_NCCL_DUMP_ON_TIMEOUT",
            "docs/flight_recorder.md",
            "Nothing to set: the recorder is on in every job",
        ],
        [
            "lib/model.py:1",
            "torch.distributed.fsdp.StateDictType",
            "docs/differences.md#names-of-torchdistributedfsdp-that-are-not-here",
            "FSDP1's; a state dict here has DTensors, and full_tensor() is the whole",
        ],
    ]


def test_check_and_diff_change_nothing(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = _texts(tree)
    assert main([str(tree), "--check"]) == 1
    assert "3 files to change, of 6.\n  train.py\n" in capsys.readouterr().out
    assert main([str(tree / "train.py"), "--diff"]) == 0
    output = capsys.readouterr().out
    assert "-import torch.distributed as dist\n+import disttrain as dist\n" in output
    assert output.endswith("Nothing is left to you.\n")
    assert main([str(tree / "lib" / "plain.py"), "--check"]) == 0
    assert main([str(tree / "run.sh"), "--check"]) == 1
    assert _texts(tree) == before


def test_what_cannot_be_read_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "odd.py").write_bytes(b"import torch  # \xff\n")
    assert main([str(tmp_path), "--check"]) == 1
    assert "odd.py:1" in capsys.readouterr().out
    assert main([str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"disttrain.move: {tmp_path / 'none'}: There is no such file or folder.\n"
