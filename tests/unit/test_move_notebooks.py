"""A notebook moves as a program: its cells, and nothing else in the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from disttrain.move.cli import main
from disttrain.move.notebooks import move_notebook

CELLS = [
    ("markdown", "torch.distributed is *here*"),
    ("code", "%%writefile train.py\nimport torch.distributed as dist\n"),
    ("code", "%matplotlib inline\nimport torch.distributed as dist\nfrom torch.distributed import fsdp\n"),
    ("code", "if True:\n    !torchrun --nproc-per-node 2 train.py\ndist.tensor.parallel.loss_parallel()  # ä\n"),
    ("code", "dist.shrink_group([1])\nfsdp.fully_shard(model, nothing=1)"),
]


def _written(cells: list[tuple[str, str]], *, as_text: bool = False, **form: Any) -> str:
    found = []
    for kind, text in cells:
        source: object = text if as_text else text.splitlines(keepends=True)
        found.append({"cell_type": kind, "metadata": {"b": 1, "a": 2}, "source": source})
    return json.dumps({"cells": found, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}, **form) + "\n"


@pytest.mark.parametrize(
    ("as_text", "form"),
    [
        (False, {"indent": 1, "ensure_ascii": False}),
        (True, {"indent": 2, "ensure_ascii": True}),
        (False, {"ensure_ascii": False}),
    ],
)
def test_cells_are_one_program(as_text: bool, form: dict[str, Any]) -> None:
    before = _written(CELLS, as_text=as_text, **form)
    moved = move_notebook(before)
    after = [
        *CELLS[:2],
        ("code", "%matplotlib inline\nimport disttrain as dist\nfrom disttrain import fsdp2 as fsdp\n"),
        ("code", "if True:\n    !torchrun --nproc-per-node 2 train.py\ndist.tp.loss_parallel()  # ä\n"),
        CELLS[4],
    ]
    assert moved.text == _written(after, as_text=as_text, **form)
    assert [one.what for one in moved.findings if one.what != "torchrun"] == [
        "dist.shrink_group",
        "fsdp.fully_shard(nothing=)",
    ]
    assert any(one.what == "torchrun" for one in moved.findings)
    if form.get("indent") and not as_text:
        lines = before.splitlines()
        for one in moved.findings:
            assert one.what.partition("(")[0] in lines[one.line - 1]
    assert move_notebook(moved.text).text == moved.text


@pytest.mark.parametrize(
    "text",
    [
        '{"cells": [ {"cell_type": "code", "source": "import torch.distributed as dist"}]}',  # written by hand
        "import torch.distributed",
        _written([("code", "import torch.distributed as dist\nprint 'old'")], indent=1),
    ],
)
def test_what_cannot_be_read_is_told(text: str) -> None:
    moved = move_notebook(text)
    assert moved.text == text
    assert moved.findings


def test_programs_without_a_suffix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train").write_text("#!/usr/bin/env python3\nimport torch.distributed as dist\n")
    (tmp_path / "start").write_text("#!/bin/bash\nexec torchrun train\n")
    (tmp_path / "Dockerfile.gpu").write_text('CMD ["torchrun", "train"]\n')
    (tmp_path / "data").write_bytes(b"\x00torchrun")
    (tmp_path / "book.ipynb").write_text(_written([("code", "import torch.distributed as dist")], indent=1))
    assert main([str(tmp_path), "--dry-run"]) == 0
    assert "-import torch.distributed as dist" in capsys.readouterr().out
    assert main([str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert (tmp_path / "train").read_text() == "#!/usr/bin/env python3\nimport disttrain as dist\n"
    assert '"import disttrain as dist"' in (tmp_path / "book.ipynb").read_text()
    assert "2 files changed, of 4." in output
    assert "start:2" in output
    assert "Dockerfile.gpu:1" in output
