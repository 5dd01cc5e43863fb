"""The tree drawn at the top of `disttrain/errors.py` is the tree of its classes."""

from __future__ import annotations

import inspect

from disttrain import errors


def _drawn() -> dict[str, str | None]:
    """Each class in the drawing and the one that it hangs from."""
    parents: dict[str, str | None] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        name = next((word for word in line.split() if word.endswith("Error")), None)
        if name is None or line.lstrip(" │├└─").split()[0] != name:
            continue
        column = line.index(name)
        above = [(left, parent) for left, parent in above if left < column]
        parents[name] = above[-1][1] if above else None
        above.append((column, name))
    return parents


def _written() -> dict[str, str | None]:
    """Each class of the module and the first of its bases that is in the module too."""
    classes = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]
    return {
        kind.__name__: next((base.__name__ for base in kind.__bases__ if base in classes), None) for kind in classes
    }


def test_the_drawing_is_the_code() -> None:
    drawn = _drawn()
    assert drawn["DisttrainError"] is None
    assert drawn == _written()
