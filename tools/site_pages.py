"""What mkdocs makes into pages besides docs/: the reference, the repository's own pages, and files that pages link to.

Nothing is imported: public names are read from each package's `__init__.py`. Links out of docs/ (to an example, a
figure, a test) lead to a page that shows the file, so that the site is whole by itself.

https://www.mkdocs.org/user-guide/configuration/#hooks
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OWN_PAGES = {
    "ARCHITECTURE.md": "project/architecture.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "README.md": "project/readme.md",
    "examples/README.md": "project/examples.md",
}
"""Pages of the repository that are not in docs/, and where they are on the site."""
OWN_PAGES |= {
    str(path.relative_to(ROOT)): f"project/rooms/{path.parent.name}.md"
    for path in sorted([*ROOT.glob("disttrain/*/README.md"), *ROOT.glob("launcher/*/README.md")])
}

AT_THE_FRONT_DOOR = {"disttrain.mesh", "disttrain.process_group"}
PARTS = {f"disttrain.{path.parent.name}" for path in (ROOT / "disttrain").glob("[!_]*/__init__.py")}
_WITHIN = {"disttrain.checkpoint.interop", "disttrain.process_group.functional"}
PACKAGES = ("disttrain", *sorted(PARTS - AT_THE_FRONT_DOOR | _WITHIN))
"""Those with a page of reference."""

_SHIM = "https://unpkg.com/iframe-worker/shim"
"""What mkdocs-material loads from elsewhere to search in a folder; ours is docs/assets/worker.js."""

_LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
_LANGUAGES = {".json": "json", ".md": "markdown", ".py": "python", ".toml": "toml"}


def public_names(package: str) -> dict[str, str]:
    """What a package exports, in the order of the alphabet, and where each is defined.

    That is its `__all__`; where this is computed, all that its `__init__.py` imports from disttrain.
    """
    homes: dict[str, str] = {}
    listed: list[str] | None = None
    for node in ast.walk(_init(package)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("disttrain"):
            module = node.module or ""
            for name in [alias.asname or alias.name for alias in node.names]:
                homes.update(public_names(module) if name == "*" else {name: f"{module}.{name}"})
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            listed = ast.literal_eval(node.value) if isinstance(node.value, ast.List) else None
    homes.pop("lazily", None)
    names = sorted(homes if listed is None else listed)
    return {name: homes.get(name, f"{package}.{name}") for name in names if not name.startswith("_")}


def reference_page(package: str) -> str:
    """The page of a package: what it is for, and each public name in the order of the alphabet."""
    entries = [f"::: {home}" for home in public_names(package).values()]
    return "\n\n".join([f"# {package}", ast.get_docstring(_init(package)) or "", *entries]) + "\n"


def errors_page() -> str:
    """The page of the errors: their tree, then each."""
    tree = ast.parse((ROOT / "disttrain" / "errors.py").read_text(encoding="utf-8"))
    entries = [f"::: disttrain.errors.{node.name}" for node in tree.body if isinstance(node, ast.ClassDef)]
    return "\n\n".join(["# disttrain.errors", ast.get_docstring(tree) or "", *entries]) + "\n"


def shown_file(path: str) -> str:
    """A page that shows a file of the repository."""
    text = (ROOT / path).read_text(encoding="utf-8")
    fence = "`" * 6  # more than any file has in it
    language = _LANGUAGES.get(Path(path).suffix, "text")
    return f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n{fence}{language}\n{text}{fence}\n"


def targets(text: str, page: str) -> Iterator[str]:
    """The files of the repository that a page links to; `page` is its own path there."""
    for match in _LINK.finditer(text):
        path = _resolved(match[2], page)
        if path is not None:
            yield path


def relinked(text: str, page: str) -> str:
    """The page with its links as they are on the site."""

    def changed(match: re.Match[str]) -> str:
        path = _resolved(match[2], page)
        if path is None:
            return match[0]
        return match[1] + posixpath.relpath(_place(path), posixpath.dirname(_place(page))) + match[3]

    return _LINK.sub(changed, text)


def reference_pages() -> dict[str, str]:
    """All of them, by their places on the site."""
    pages = {f"reference/{package.removeprefix('disttrain.')}.md": reference_page(package) for package in PACKAGES}
    return {**pages, "reference/errors.md": errors_page()}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """mkdocs has read its configuration."""
    assert config.nav is not None
    config.nav.append({"Reference": list(reference_pages())})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """mkdocs asks which files there are."""
    from mkdocs.structure.files import File  # here, so that tests do without mkdocs

    made = {place: (ROOT / path).read_text(encoding="utf-8") for path, place in OWN_PAGES.items()}
    made |= reference_pages()
    pages = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    pages |= {path: made[place] for path, place in OWN_PAGES.items()}
    linked = {path for page, text in pages.items() for path in targets(text, page)}
    made |= {_place(path): shown_file(path) for path in linked if _place(path).startswith("source/")}
    for place, text in sorted(made.items()):
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """mkdocs is about to render a page."""
    place = page.file.src_uri
    path = next((path for path, own in OWN_PAGES.items() if own == place), f"docs/{place}")
    return markdown if place.startswith(("source/", "reference/")) else relinked(markdown, path)


def on_post_page(output: str, page: Page, **_: object) -> str:
    """mkdocs has rendered a page."""
    return output.replace(_SHIM, posixpath.relpath("assets/worker.js", posixpath.dirname(page.url) or "."))


def _init(package: str) -> ast.Module:
    return ast.parse(ROOT.joinpath(*package.split("."), "__init__.py").read_text(encoding="utf-8"))


def _resolved(link: str, page: str) -> str | None:
    """The file of the repository that `link` on `page` means; None: an address, or nothing that is there."""
    if "://" in link or link.startswith(("/", "mailto:")):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    return path if (ROOT / path).is_file() else None


def _place(path: str) -> str:
    """Where a file of the repository is on the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return OWN_PAGES.get(path, f"source/{path}.md")
