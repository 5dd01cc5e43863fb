"""The documentation's site: every page has its place, every public package its reference, every picture is as drawn."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from tools import pictures, site_pages

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("package", site_pages.PACKAGES)
def test_a_reference_has_all_public_names(package: str) -> None:
    exported = [name for name in importlib.import_module(package).__all__ if not name.startswith("_")]
    assert list(site_pages.public_names(package)) == exported


def test_every_page_has_its_place() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    named = re.findall(r"([\w./]+\.md)\n", nav)
    written = {path.name for path in (ROOT / "docs").glob("*.md")} | {"decisions/README.md"}
    assert sorted(named) == sorted({*written, *site_pages.OWN_PAGES.values()} - {"project/readme.md"})


def test_links_lead_somewhere() -> None:
    pages = [*(ROOT / path for path in site_pages.OWN_PAGES), *(ROOT / "docs").rglob("*.md")]
    broken = {
        str(page.relative_to(ROOT)): link
        for page in pages
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
        if "://" not in link and not link.startswith("reference/") and not (page.parent / link).exists()
    }
    assert broken == {}


def test_pictures_are_as_they_are_drawn() -> None:
    """After a change: `python tools/pictures.py`."""
    images = ROOT / "docs" / "images"
    drawn = pictures.pictures()
    assert {name: (images / name).read_text(encoding="utf-8") == drawn[name] for name in drawn} == dict.fromkeys(
        drawn, True
    )


def test_docstrings_become_lists() -> None:
    pytest.importorskip("griffe", reason="griffe, which reads docstrings for the site, is not installed: make docs")
    from tools.site_docstrings import as_markdown

    said = """Gather.

Args:    a, b  two tensors; sizes may
               differ;  group  None: all.
         c     a third one.
Returns: Work."""
    assert as_markdown(said) == (
        "Gather.\n\n**Args:**\n\n- `a, b`: two tensors; sizes may differ\n- `group`: None: all.\n- `c`: a third one."
        "\n\n**Returns:** Work."
    )
