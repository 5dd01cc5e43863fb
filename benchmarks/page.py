"""The page of all results, made from their files."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from forms import rows_of
from harness import OURS, TORCH, Row, brief, read, shown

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
MACHINES = {"device", "devices", "gpus", "machine", "topology"}
PAGES = {
    "attention": "kernels.md",
    "checkpoint": "checkpoints.md",
    "collectives": "collectives.md",
    "experts": "experts.md",
    "fsdp2": "fsdp2.md",
    "kernels": "kernels.md",
    "kernels_float8": "float8.md",
    "models": "kernels.md",
    "plan": "planning.md",
    "pipeline": "pipelines.md",
    "tp": "tensor_parallel.md",
}
"""Where results lie in words, by how their names begin."""
HEAD = """# Benchmarks

Each row is one case, measured in turns with torch's way of doing the same, in the same run: medians, with quartiles in
brackets (least and most where there are fewer than four rounds; of older runs on GPUs, the least alone). The ratio is
ours over torch's; **bold** where torch is ahead by more than a twentieth. Where torch has several ways, its best one in
that run is compared, and named. What torch has no counterpart for
is compared with a floor or another way, or stands alone.

    make bench                                  # all that need no GPU, on this machine, as one table
    .venv/bin/python benchmarks --keep --page   # ... and this page

The files are in `benchmarks/results/`.
"""


def as_page(folder: Path) -> str:
    """Markdown of all results in `folder`, those on processors before those on GPUs, then where others' tables are."""
    files = {path: json.loads(path.read_text()) for path in folder.glob("*.json")}
    known = {path: read(path) if "rows" in found else _older(path.stem, found) for path, found in files.items()}
    known = {path: known[path] for path in sorted(known, key=lambda path: (_place(known[path][0]), path.stem))}
    parts = [HEAD]
    for place, group in itertools.groupby(
        filter(lambda path: known[path][1], known), lambda path: _place(known[path][0])
    ):
        parts.append(f"## On {place or 'processors'}\n")
        parts += [_section(path.stem, *known[path]) for path in group]
    others = [
        _line([f"[{path.stem}](../benchmarks/results/{path.name})", _machine(files[path]), _table_of(path.stem)])
        for path, (_, rows) in sorted(known.items())
        if not rows
    ]
    if others:
        parts += [
            "## With tables of their own\n",
            _line(["results", "machine", "table"]),
            _line(["---"] * 3),
            *others,
            "",
        ]
    return "\n".join(parts)


def _place(about: dict[str, Any]) -> str:
    """The GPUs, such as 2 x NVIDIA H200; nothing: processors."""
    name = about["machine"].get("name", "")
    return name.partition(",")[0] if "NVIDIA" in name else ""


def _older(stem: str, found: dict[str, Any]) -> tuple[dict[str, Any], list[Row]]:
    """Of a report without rows, what it is about and the rows in it."""
    runs = [one for one in found.values() if isinstance(one, dict) and "results" in one]
    first = runs[0] if runs and "command" not in found else found
    name = _machine(found)
    version = found.get("torch_version", first.get("versions", ""))
    torch = version["torch"] if isinstance(version, dict) else str(version).rpartition("torch ")[2].partition(",")[0]
    return {
        "command": str(first.get("command", _with_flags(stem, found.get("arguments", {})))),
        "commit": str(first.get("commit", "")),
        "versions": {"torch": torch},
        "machine": {"name": f"1 x {name}" if name.startswith("NVIDIA") else name},
    }, rows_of(found)


def _with_flags(stem: str, arguments: dict[str, str]) -> str:
    """Of reports that kept flags alone."""
    flags = [f"--{name} {value}" for name, value in arguments.items() if value not in ("None", "False", "")]
    return " ".join([f"benchmarks/{stem.partition('_gpu')[0]}_gpu.py", *flags])


def _machine(found: dict[str, Any]) -> str:
    """What it ran on, by any of the names that scripts have for it; of several runs, the first's."""
    if not MACHINES & found.keys():
        return _machine(next(each for each in found.values() if isinstance(each, dict)))
    return str(found[min(MACHINES & found.keys())]).removeprefix("one node, ")


def _table_of(name: str) -> str:
    """The page with its figures."""
    page = PAGES[max((start for start in PAGES if name.startswith(start)), key=len)]
    return f"[{page.partition('.')[0].replace('_', ' ')}]({page})"


def _section(name: str, about: dict[str, Any], rows: list[Row]) -> str:
    versions, machine = about["versions"], about["machine"]
    where = machine["name"] if "name" in machine else f"{machine['num_cores']} cores, load {machine.get('load', '?')}"
    torch = f", torch {versions['torch']}" if "torch" in versions else ""
    lines = [f"### {name}", "", f"`{about['command']}`: {where}{torch}, commit {about['commit'][:9] or 'unknown'}", ""]
    for sides, group in itertools.groupby(rows, lambda row: row.columns):
        both = OURS in sides and TORCH in sides
        heads = ["case", "unit", *sides, *(["ours / torch"] if both else [])]
        lines += [_line(heads), _line(["---"] * len(heads))]
        lines += [
            _line([row.case, row.unit, *(shown(row.sides[side]) for side in sides), *_ratio(row)]) for row in group
        ]
        lines.append("")
    return "\n".join(lines)


def _ratio(row: Row) -> list[str]:
    if row.ratio is None:
        return []
    text = brief(row.ratio)
    return [f"**{text}**" if row.is_behind else text]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
