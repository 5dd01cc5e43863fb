"""The files of a source tree, and each one's move."""

from __future__ import annotations

import io
import os
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from disttrain.move.commands import told_commands
from disttrain.move.findings import Finding
from disttrain.move.notebooks import move_notebook
from disttrain.move.source import move_source

_PYTHON = {".py", ".pyi"}
_NOTEBOOK = ".ipynb"
_COMMANDS = {
    ".bash",
    ".cfg",
    ".dockerfile",
    ".ini",
    ".mk",
    ".pbs",
    ".sbatch",
    ".sh",
    ".slurm",
    ".toml",
    ".yaml",
    ".yml",
}
_COMMANDS |= {".zsh"}
_NAMED = ("Containerfile", "Dockerfile", "Makefile", "Procfile", "justfile")
_UNREAD = "docs/moving_over.md#what-is-left-to-you"


@dataclass(frozen=True)
class Change:
    """Of one file: its text before and after, in `encoding`, and what is left; `told` with lines of the text after."""

    path: Path
    before: str
    after: str
    encoding: str
    findings: tuple[Finding, ...]
    told: tuple[Finding, ...]

    @property
    def is_changed(self) -> bool:
        return self.before != self.after

    def write(self) -> None:
        self.path.write_bytes(self.after.encode(self.encoding))


def changes(path: Path) -> Iterator[Change]:
    """Of a file, or of all below a folder, in order; hidden folders and environments are passed over."""
    for file in [path] if path.is_file() else _files(path):
        suffix = file.suffix or _of_first_line(file)
        if suffix in _PYTHON or suffix == _NOTEBOOK or suffix in _COMMANDS or file.name.startswith(_NAMED):
            yield _change(file, suffix)


def _of_first_line(path: Path) -> str:
    """A suffix for a program without one, by the line that says what runs it."""
    with path.open("rb") as file:
        start = file.read(2)
        line = file.readline(200) if start == b"#!" else b""
    return ".py" if b"python" in line else ".sh" if line else ""


def _change(path: Path, suffix: str) -> Change:
    content, is_python = path.read_bytes(), suffix in _PYTHON
    try:
        encoding = tokenize.detect_encoding(io.BytesIO(content).readline)[0] if is_python else "utf-8"
        text = content.decode(encoding)
    except (SyntaxError, UnicodeDecodeError) as error:
        unread = (Finding(1, "the file", f"It cannot be read: {error}", _UNREAD),) if b"torch" in content else ()
        return Change(path, "", "", "utf-8", unread, unread)
    if suffix == _NOTEBOOK:
        moved = move_notebook(text)
        return Change(path, text, moved.text, encoding, moved.findings, moved.told)
    if not is_python:
        findings = told_commands(text)
        return Change(path, text, text, encoding, findings, findings)
    moved = move_source(text)
    return Change(path, text, moved.text, encoding, moved.findings, moved.told)


def _files(folder: Path) -> Iterator[Path]:
    for name, folders, files in os.walk(folder):
        parent = Path(name)
        folders[:] = sorted(child for child in folders if _is_source(parent / child))
        yield from (parent / file for file in sorted(files) if not (parent / file).is_symlink())


def _is_source(folder: Path) -> bool:
    is_hidden = folder.name.startswith(".") or folder.name in ("__pycache__", "node_modules")
    return not is_hidden and not (folder / "pyvenv.cfg").exists()
