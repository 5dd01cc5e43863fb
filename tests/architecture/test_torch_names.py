"""Every public name of torch.distributed is here too, or docs/differences.md says why not."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import torch.distributed as dist

import disttrain

PAGE = Path(__file__).parents[2] / "docs" / "differences.md"


def test_each_name_is_here_or_explained() -> None:
    theirs = {name for name, value in vars(dist).items() if not name.startswith("_") and callable(value)}
    section = PAGE.read_text(encoding="utf-8").partition("## Names of torch.distributed")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    explained = re.findall(r"`(\w+)`", " ".join(rows))
    ours = set(disttrain.__all__)
    assert len(theirs) > 80
    assert sorted(theirs - ours - set(explained)) == []
    assert sorted(ours & set(explained)) == []


def test_what_is_here_takes_torchs_arguments_in_torchs_order() -> None:
    differing = []
    for name in sorted(set(disttrain.__all__) & set(vars(dist))):
        theirs, ours = getattr(dist, name), getattr(disttrain, name)
        if not inspect.isfunction(theirs) or not inspect.isfunction(ours):
            continue
        expected = [argument for argument in inspect.signature(theirs).parameters if not argument.startswith("_")]
        found = list(inspect.signature(ours).parameters)
        # We may know fewer arguments, or more: as far as both go, they are the same.
        if found[: len(expected)] != expected[: len(found)]:
            differing.append(f"{name}: torch {expected}, ours {found}")
    assert differing == []
