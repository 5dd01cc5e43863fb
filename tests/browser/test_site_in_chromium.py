"""The documentation's site in a browser, opened as a folder: it asks nobody for anything, and its search finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.surroundings.chromium import Chromium

ROOT = Path(__file__).parents[2]
SHOWN = ("benchmarks", "disttrain", "docs", "examples", "launcher", "tools")
"""What there are pages of."""
SEARCHES = {
    "straggler": "Verdicts",
    "notebook": "Notebooks",
    "SIGTERM": "Preemption",
    "DDP": "Coming from DDP",
    "torchmetrics": "torchmetrics",
    "out of memory": "It runs out of memory",
    "slow": "It is slow",
    "MoE": "Mixtures of experts",
    "mixture of experts": "Mixtures of experts",
    "expert parallel": "Expert parallel",
    "DeepSeek": "Mixtures of experts",
}
"""What a reader looks for, and the heading among what the search finds."""
SEARCH = """new Promise(done => {
  document.getElementById("__search").checked || document.getElementById("__search").click()
  const input = document.querySelector(".md-search__input")
  const list = document.querySelector(".md-search-result__list")
  list.replaceChildren()
  input.focus()
  input.value = WORDS
  input.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}))
  const look = () => list.children.length ? done(list.innerText) : setTimeout(look, 50)
  look()
})"""


def built(folder: Path) -> Path:
    """The site as `make docs` left it, unless something was written since; else it is built into `folder`."""
    made = ROOT / "build" / "site"
    files = [path for part in SHOWN for path in (ROOT / part).rglob("*")] + [*ROOT.glob("*.*")]
    last_written = max(path.stat().st_mtime for path in files if path.is_file() and path.suffix != ".pyc")
    if (made / "index.html").exists() and (made / "index.html").stat().st_mtime > last_written:
        return made
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    return folder


def test_it_is_whole_by_itself_and_can_be_searched(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs, which builds the site, is not installed: make docs")
    browser = Chromium(tmp_path / "profile")  # first, since a site is not built where there is none
    try:
        site = built(tmp_path / "site")
        for page in ("index.html", "tutorial.html", "reference/pipelining.html", "decisions/index.html"):
            browser.show(site / page)
        assert [said for said in browser.complaints if "data:image" not in said] == []
        for words, heading in SEARCHES.items():
            assert heading in browser.value(SEARCH.replace("WORDS", json.dumps(words))), words
    finally:
        browser.close()
