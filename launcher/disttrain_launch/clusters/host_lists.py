"""Slurm's short form of host names: `gpu[01-04,7],x3` is gpu01, gpu02, gpu03, gpu04, gpu7 and x3.

The form: Slurm's documentation of scontrol, "show hostnames". Numbers keep their leading zeros; a name may have several
brackets, of which the last runs fastest.
"""

from __future__ import annotations

import re

_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
MAX_HOSTS = 1 << 20


def expand(text: str) -> tuple[str, ...]:
    """The names in a host list, in its order. Raises ValueError with what is wrong."""
    hosts: list[str] = []
    at = 0
    while at < len(text):
        names = [""]
        while (piece := _PIECE.match(text, at)) is not None:
            parts = [piece[2]] if piece[1] is None else _numbers(piece[1])
            if len(names) * len(parts) + len(hosts) > MAX_HOSTS:
                raise ValueError(f"more than {MAX_HOSTS} names")
            names = [name + part for name in names for part in parts]
            at = piece.end()
        if names == [""] or text[at : at + 1] not in ("", ","):
            raise ValueError(f"{text[at:]!r} is not a name")
        hosts += names
        at += 1
    if not hosts or text.endswith(","):
        raise ValueError("a name is missing")
    return tuple(hosts)


def _numbers(text: str) -> list[str]:
    numbers: list[str] = []
    for item in text.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise ValueError(f"{item!r} is not a range of numbers")
        first, last = match[1], match[2] or match[1]
        if not int(first) <= int(last) < int(first) + MAX_HOSTS:
            raise ValueError(f"{item!r} is not a range of numbers")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers
