"""The code of README.md and docs/ does what it says: Python is run on ranks, commands are known with their flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from disttrain.testing import RankPool
from tests import doc_pages
from tests.doc_pages import PAGES, Block, blocks, compiled, setup_of

BLOCKS = [block for page in PAGES for block in blocks(page)]


def _named(block: Block) -> str:
    return f"{block.page}:{block.line}"


@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS if block.is_run}))
def test_the_code_of_a_page_runs(page: str, rank_pool: RankPool, tmp_path: Path) -> None:
    num_ranks = getattr(setup_of(page), "NUM_RANKS", 2)
    rank_pool.run(num_ranks, doc_pages.run_page, {"page": page, "folder": str(tmp_path)})


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "python"], ids=_named)
def test_code_is_python(block: Block) -> None:
    compiled(block)
