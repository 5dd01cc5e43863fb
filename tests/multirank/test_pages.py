"""The code of README.md and docs/ does what it says: Python is run on ranks, commands are known with their flags."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from disttrain.testing import RankPool
from tests.pages import code
from tests.pages.code import PAGES, ROOT, Block, blocks, commands_with_output, compiled, setup_of
from tests.pages.commands import missing_files, problems
from tests.surroundings.launching import environment

if TYPE_CHECKING:
    from tests.forkserver.process import ForkServer

BLOCKS = [block for page in PAGES for block in blocks(page)]


def _named(block: Block) -> str:
    return f"{block.page}:{block.line}"


@pytest.mark.sweep(2)
@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS if block.is_run}))
def test_the_code_of_a_page_runs(page: str, rank_pool: RankPool, tmp_path: Path) -> None:
    num_ranks = getattr(setup_of(page), "NUM_RANKS", 2)
    rank_pool.run(num_ranks, code.run_page, {"page": page, "folder": str(tmp_path)})


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "python"], ids=_named)
def test_code_is_python(block: Block) -> None:
    compiled(block)


def test_commands_are_known(fork_server: ForkServer) -> None:
    """Programs, scripts and flags that pages show."""
    found = {
        _named(block): wrong
        for block in BLOCKS
        if block.language in ("sh", "console")
        for command, _ in commands_with_output(block)
        if (wrong := problems(command, fork_server))
    }
    assert found == {}


def test_files_that_pages_name_are_there() -> None:
    assert {page: gone for page in PAGES if (gone := missing_files(ROOT / page))} == {}


@pytest.mark.sweep(0)
def test_tests_that_the_page_of_testing_shows(
    tmp_path: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for block in blocks("docs/testing.md"):
        if block.title.endswith(".py"):
            (tmp_path / block.title).write_text(block.text, encoding="utf-8")
    # A configuration of its own: else pytest goes by the first one that it finds above.
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    argv = ("-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path)
    done = fork_server.run(*argv, environ=environment())
    assert "3 passed" in done.stdout, done.stdout + done.stderr
