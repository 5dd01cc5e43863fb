"""The example scripts, which are installed with the library: lists them, and copies them out.

    python -m disttrain.examples             # which there are
    python -m disttrain.examples examples    # copies them into this folder

Copies are the reader's, to be started, changed and kept; nothing imports the installed ones.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from disttrain.errors import SettingError

_INSTALLED = Path(__file__).parent / "scripts"
_IN_THE_REPOSITORY = Path(__file__).parents[2] / "examples"
_OPERATION = "examples"
_MAX_NAMED = 5


def descriptions() -> dict[str, str]:
    """The first line that each script says of itself, by the script's name."""
    return {path.name: _first_line(path) for path in sorted(_folder().glob("*.py"))}


def copy_to(folder: str | Path, *, overwrites: bool = False) -> list[Path]:
    """Copies all examples into `folder`, which is made where it does not exist; returns the files that are new in it.

    What is in it already, as it is here, stays. Raises: SettingError, and copies nothing, where it has other files of
    these names; with `overwrites` they are replaced. OSError where it cannot be written.
    """
    target = Path(folder)
    missing = {name: data for name, data in _files() if not _is_same(target / name, data)}
    changed = [name for name in missing if (target / name).exists()]
    if changed and not overwrites:
        named = ", ".join(changed[:_MAX_NAMED]) + (" and others" if len(changed) > _MAX_NAMED else "")
        problem = f"{target} has other files of these names: {named}. Nothing was copied."
        raise SettingError(_OPERATION, problem, "Name another folder, or add --overwrite.")
    for name, data in missing.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(data)
    return [target / name for name in missing]


def _folder() -> Path:
    folder = _INSTALLED if _INSTALLED.is_dir() else _IN_THE_REPOSITORY
    if not folder.is_dir():
        raise SettingError(_OPERATION, f"there are none in {_INSTALLED}.", "Install disttrain again.")
    return folder


def _files() -> Iterator[tuple[str, bytes]]:
    """All of their files, by their paths in the folder."""
    folder = _folder()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path.relative_to(folder).as_posix(), path.read_bytes()


def _is_same(path: Path, data: bytes) -> bool:
    return path.is_file() and path.read_bytes() == data


def _first_line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


__all__ = ["copy_to", "descriptions"]
