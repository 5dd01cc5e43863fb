"""What the page of differences cites as the test of a line is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_cited_test_is_there() -> None:
    page = (ROOT / "docs" / "differences.md").read_text(encoding="utf-8")
    missing, file, num_cited = [], "", 0
    for path, name in re.findall(r"`(tests/[\w/]+\.py)?(?:::(\w+))?`", page):
        if not path and not name:
            continue
        num_cited += 1
        file = path or file  # `::name` alone is in the file before
        place = ROOT / file
        text = place.read_text(encoding="utf-8") if place.exists() else ""
        if not text or (name and f"def {name}(" not in text):
            missing.append(f"{file}::{name}")
    assert num_cited > 80
    assert missing == []
