"""What all benchmarks share: sides in turns, rows with their spread, and one form of results.

A results file is JSON: `about` (command, commit, versions, machine), `rows`, and `details` of this benchmark only. A
row is one case with the figures of its sides; `ours` and `torch` are compared, others show a floor or another way. A
spread is median and quartiles; of fewer than four values it is median, least and most.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OURS, TORCH = "ours", "torch"
_RESULTS_FLAGS = ("json", "out")
PACKAGES = ("disttrain", "torch", "numpy", "msgpack", "uvloop", "pyuv", "triton")


@dataclass(frozen=True)
class Spread:
    """Of repeated measurements, in the unit of their row."""

    median: float
    lower: float
    upper: float


def spread(values: Sequence[float], scale: float = 1.0) -> Spread:
    scaled = sorted(value * scale for value in values)
    if len(scaled) < 4:
        return Spread(statistics.median(scaled), scaled[0], scaled[-1])
    lower, median, upper = statistics.quantiles(scaled, n=4)
    return Spread(median, lower, upper)


@dataclass(frozen=True)
class Row:
    """One case. `unit` is that of all its sides; less is better unless `more_is_better`."""

    case: str
    unit: str
    sides: Mapping[str, Spread]
    more_is_better: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """The sides, those that are compared first."""
        return tuple(sorted(self.sides, key=lambda side: (side != OURS, side != TORCH)))

    @property
    def ratio(self) -> float | None:
        """Ours over torch's; None where one of them is missing."""
        ours, torch = self.sides.get(OURS), self.sides.get(TORCH)
        return ours.median / torch.median if ours and torch and torch.median else None

    @property
    def is_behind(self) -> bool:
        """Torch is ahead by more than a twentieth."""
        if self.ratio is None:
            return False
        return self.ratio < 1 / 1.05 if self.more_is_better else self.ratio > 1.05


def row(case: str, unit: str, taken: Mapping[str, Sequence[float]], scale: float = 1.0) -> Row:
    """Of all values of each side, `scale` times what they are."""
    return Row(case, unit, {side: spread(values, scale) for side, values in taken.items()})


def in_turns(calls: Mapping[str, Callable[[], float]], num_rounds: int, num_warmups: int = 0) -> dict[str, list[float]]:
    """What each call returns in each round. In each round all are called, so that all meet the same machine."""
    taken: dict[str, list[float]] = {side: [] for side in calls}
    for round_number in range(num_warmups + num_rounds):
        for side, call in calls.items():
            value = call()
            if round_number >= num_warmups:
                taken[side].append(value)
    return taken


def table(rows: Iterable[Row]) -> str:
    """A line per case: medians with their spread, and ours over torch's. A head wherever the sides change."""
    return "\n\n".join(_table(sides, list(group)) for sides, group in itertools.groupby(rows, lambda one: one.columns))


def _table(sides: tuple[str, ...], rows: list[Row]) -> str:
    heads = ["", "unit", *sides]
    cells = [[each.case, each.unit, *(shown(each.sides[side]) for side in sides)] for each in rows]
    if OURS in sides and TORCH in sides:
        heads.append("ours / torch")
        for line, each in zip(cells, rows, strict=True):
            line.append("" if each.ratio is None else f"{each.ratio:.2f}")
    return aligned(heads, cells)


def aligned(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in (heads, *cells))


def shown(of: Spread) -> str:
    once = brief(of.median)
    return once if of.lower == of.upper else f"{once} [{brief(of.lower)}, {brief(of.upper)}]"


def brief(value: float) -> str:
    """Three digits that count."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 else 4
    return f"{value:.{digits}f}"


def command_line(doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results to this file too")
    return parser


def asked() -> str:
    """This script and its flags, as a shell takes them, but for where results go, which is nobody else's folder."""
    script = f"benchmarks/{Path(sys.argv[0]).name}"
    kept, words = [], iter(sys.argv[1:])
    for word in words:
        flag, _, value = word.partition("=")
        if flag not in [f"--{name}" for name in _RESULTS_FLAGS]:
            kept.append(word)
        elif not value:
            next(words, None)
    num_ranks = os.environ.get("LOCAL_WORLD_SIZE")
    start = ["disttrain-launch", "--standalone", "--nproc-per-node", num_ranks] if num_ranks else ["python"]
    return shlex.join([*start, script, *kept])


def flags_of(options: argparse.Namespace) -> dict[str, str]:
    """All flags of a benchmark with their values, but for where results go."""
    return {name: str(value) for name, value in vars(options).items() if name not in _RESULTS_FLAGS}


def without_name_servers() -> None:
    """For this process and those that it starts: torch's store looks up the name of whoever connects, and shows the
    address where there is none. Where no server answers, each connect would wait for seconds."""
    os.environ["RES_OPTIONS"] = "attempts:0"
    # It warns at each of them.
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"


def about() -> dict[str, Any]:
    """What it takes to do it again."""
    here = Path(__file__).parent
    commit = ""
    if shutil.which("git"):
        ran = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=here)
        commit = ran.stdout.strip()
    found = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    return {
        "command": asked(),
        "commit": commit,
        "versions": {
            "python": platform.python_version(),
            **{name: found[name] for name in PACKAGES if name in found},
        },
        "machine": {"num_cores": os.cpu_count(), "kernel": platform.release(), "load": round(os.getloadavg()[0], 2)},
    }


def keep(report: Mapping[str, Any], path: Path) -> None:
    """Write a report of a benchmark on GPUs, which has sides somewhere in it, as rows with the report for details."""
    from forms import rows_of  # it needs the rows of this file

    name = report.get("devices") or report.get("gpus") or report.get("topology") or report.get("machine")
    found = about()
    found |= {key: report[key] for key in ("command", "commit") if report.get(key)}
    found["machine"] |= {"name": str(name)} if name else {}
    as_rows = [*map(as_json, rows_of(report))]
    path.write_text(json.dumps({"about": found, "rows": as_rows, "details": report}, indent=1) + "\n")


def finish(rows: Sequence[Row], path: Path | None, *, machine: str = "", **details: Any) -> None:
    """Print the rows, and write them where they are wanted. `machine`: the GPUs that they are of."""
    print(table(rows))
    if path is not None:
        origin = about()
        origin["machine"] |= {"name": machine} if machine else {}
        path.write_text(
            json.dumps({"about": origin, "rows": [*map(as_json, rows)], "details": details}, indent=1) + "\n"
        )


def as_json(one: Row) -> dict[str, Any]:
    sides = {
        name: [float(f"{value:.5g}") for value in (of.median, of.lower, of.upper)] for name, of in one.sides.items()
    }
    return {"case": one.case, "unit": one.unit, "more_is_better": one.more_is_better, "sides": sides}


def read(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """What a results file is about, and its rows."""
    found = json.loads(path.read_text())
    rows = [
        Row(one["case"], one["unit"], {name: Spread(*of) for name, of in one["sides"].items()}, one["more_is_better"])
        for one in found["rows"]
    ]
    return found["about"], rows
