"""What the parts say of names that are not there is what docs/differences.md says."""

from __future__ import annotations

import importlib
import re

import pytest

from tools.absent_names import PARTS, WRITTEN, lines


def test_the_file_is_as_the_page() -> None:
    written = WRITTEN.read_text(encoding="utf-8").splitlines()
    assert written == lines(), "run `python tools/absent_names.py`"
    assert len(written) > 40


def test_each_part_is_on_the_page_and_answers_so() -> None:
    rows = [line.split("\t") for line in lines()]
    assert {package for package, _, _ in rows} == set(PARTS.values())
    for package, name, reason in (row for row in rows if row[1].isidentifier()):  # neither methods nor arguments
        with pytest.raises(AttributeError, match=re.escape(reason)):
            getattr(importlib.import_module(package), name)
