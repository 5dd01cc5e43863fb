"""The code in docs/ and README.md: which blocks there are, and what runs each page's Python on ranks.

A block says its language after the fence: `python` is run, on the CPU; `sh` is commands; `console` is commands behind
`$ `, and what they print. Where a block says none, as an indented one, its first words tell. `title="..."` that begins
with NOT_RUN marks what needs GPUs, a cluster or a person: it is compiled, or its commands are checked, and no more.

The blocks of a section (`##`) run in their order, in one namespace that has the names of the page's beginning. What
they take for granted, a model or a mesh, is made by the page's module in tests/pages/setups: it has `NUM_RANKS`, and
`names(section)`, which each rank calls. A script has its file's name as title, a notebook's cell `In [1]`; tests of
their pages run these.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import os
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
SETUPS = ROOT / "tests" / "pages" / "setups"
NOT_RUN = "not tested"
CELL = "In ["
PROGRAMS = ("disttrain-launch", "disttrain-flight", "python", "make", "mpirun", "openssl", "pip", "kill")
REPOSITORY_PAGES = ("CONTRIBUTING.md", "README.md", "examples/README.md")
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (*(ROOT / name for name in REPOSITORY_PAGES), *(ROOT / "docs").glob("*.md"))
    if path.name not in ("dtensor_ops.md", "settings.md")  # made by programs
)


@dataclass(frozen=True)
class Block:
    """One block of code, at `line` of `page`, counted from 1."""

    page: str
    section: str
    line: int
    language: str
    title: str
    text: str

    @property
    def is_run(self) -> bool:
        """Whether it is Python that tests run as a part of its page: no script, and no notebook's cell."""
        return (
            self.language == "python" and not self.title.startswith((NOT_RUN, CELL)) and not self.title.endswith(".py")
        )


def blocks(page: str) -> list[Block]:
    """All blocks of `page`, a path within the repository, from above."""
    tokens = MarkdownIt().parse((ROOT / page).read_text(encoding="utf-8"))
    found, section = [], ""
    for token, following in itertools.pairwise([*tokens, None]):
        assert token is not None
        if token.type == "heading_open" and token.tag == "h2" and following is not None:
            section = following.content
        if token.type in ("fence", "code_block"):
            assert token.map is not None
            language, _, rest = token.info.partition(" ")
            title = re.search(r'title="([^"]*)"', rest)
            line = token.map[0] + (2 if token.type == "fence" else 1)
            text = textwrap.dedent(token.content)
            language = language or _language(text)
            found.append(Block(page, section, line, language, "" if title is None else title[1], text))
    return found


def commands_with_output(block: Block) -> list[tuple[str, str]]:
    """The commands of an `sh` or `console` block, each on one line, and what a `console` shows that they print."""
    text = re.sub(r"\\\n\s*", "", block.text)
    if block.language == "sh":
        return [(line, "") for line in text.splitlines() if line.strip() and not line.startswith("#")]
    found = re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]
    return [(command, shown) for command, _, shown in (each.partition("\n") for each in found)]


def compiled(block: Block) -> Any:
    """Its code for the CPU, with the page's own line numbers. Raises: SyntaxError."""
    text = block.text.replace('"cuda"', '"cpu"')
    return compile("\n" * (block.line - 1) + text, str(ROOT / block.page), "exec")


def setup_of(page: str) -> ModuleType | None:
    """The module of what `page` takes for granted, if it does."""
    path = SETUPS / f"{Path(page).stem.lower()}.py"
    if not path.exists():
        return None
    spec = importlib.util.spec_from_file_location(f"page_setup_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_page(page: str, folder: str) -> None:
    """On each rank of a pool: run the page's Python in `folder`, the same for all."""
    import disttrain  # here, since only ranks have torch loaded

    given: Callable[[str], dict[str, Any]] = getattr(setup_of(page), "names", lambda _: {})
    # A page's scripts join and leave the job, which the pool has done for them.
    joining = {"init_process_group": lambda *_, **__: None, "destroy_process_group": lambda *_, **__: None}
    before = {name: getattr(disttrain, name) for name in joining}
    environment = dict(os.environ)
    os.chdir(folder)
    try:
        vars(disttrain).update(joining)
        beginning: dict[str, Any] = {"disttrain": disttrain}
        for section, in_section in itertools.groupby(blocks(page), lambda block: block.section):
            to_run = [block for block in in_section if block.is_run]
            if not to_run:
                continue
            namespace = {**beginning, **given(section)}
            for block in to_run:
                exec(compiled(block), namespace)  # noqa: S102  # the code is our own
            beginning = beginning if section else namespace
    finally:
        vars(disttrain).update(before)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(ROOT)


def _language(text: str) -> str:
    first = text.split(maxsplit=1)[0].removeprefix(".venv/bin/")
    if first == "$":
        return "console"
    if first in PROGRAMS:
        return "sh"
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return "text"
    is_code = any(isinstance(node, ast.Call | ast.Assign | ast.ImportFrom | ast.Import) for node in ast.walk(tree))
    return "python" if is_code else "text"
