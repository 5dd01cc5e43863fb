"""The command line of `train_lm.py`, and what is wrong with it in one line."""

from __future__ import annotations

import argparse
import json
import math
import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from disttrain import settings
from disttrain.errors import SettingError
from lm.model import PRESETS

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

RUNS = Path("runs")
CHECKPOINTS = "checkpoints"
MEMO = "flags.json"
FIXED = ("preset", "data", "batch", "seq", "seed")
"""What a run keeps until its end: a resumed run with another value would be another run."""
CHANGEABLE = ("steps", "lr", "dtype", "compile", "save_every", "eval_every")
"""What a resumed run takes on as well, unless told otherwise."""


class _Parser(argparse.ArgumentParser):
    """Every rank finds the same mistake, and raises; one of them will say it. Help is for one rank to print, too."""

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        if (settings.RANK.read() or 0) == 0:
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        raise SettingError("train_lm", f"{message}.", "See --help.")


def parse(arguments: Sequence[str] | None, num_ranks: int) -> Namespace:
    """The flags, with `out` resolved to a folder; a run that is resumed has its own flags back. Raises SettingError.

    When the launcher has started the job's workers again, the run in --out is resumed without being asked for.
    """
    parser = _parser()
    flags = parser.parse_args(arguments)
    if settings.ROUND.read() and flags.out is not None:
        flags.resume |= _has_run(flags.out)
    out = _choose_folder(flags.out, is_resumed=flags.resume)
    if flags.resume:
        saved = json.loads((out / MEMO).read_text(encoding="utf-8"))
        parser.set_defaults(**saved, resume=True)
        flags = parser.parse_args(arguments)
        for name in FIXED:
            if getattr(flags, name) != saved[name]:
                problem = f"the run in {out} has --{name} {saved[name]}, not {getattr(flags, name)}."
                raise SettingError("train_lm --resume", problem, f"Leave --{name} out, or start another run.")
    if flags.batch % num_ranks:
        problem = f"{num_ranks} ranks cannot share --batch {flags.batch} evenly."
        raise SettingError("train_lm", problem, f"Give a multiple of {num_ranks}.")
    flags.out = out
    return flags


def save(flags: Namespace) -> None:
    """Make the run's folder, with the flags in it that resuming it takes."""
    flags.out.mkdir(parents=True, exist_ok=True)
    kept = {name: getattr(flags, name) for name in FIXED + CHANGEABLE}
    (flags.out / MEMO).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def _parser() -> _Parser:
    parser = _Parser("train_lm.py", description="Train a byte-level Llama on text.", allow_abbrev=False)
    add = parser.add_argument
    add("--data", metavar="DIR", help="folder of text (default: the source of Python's standard library)")
    add("--preset", choices=PRESETS, default="small", help="size of the model (default: small)")
    add("--steps", type=_count, default=400, metavar="N", help="optimizer steps in all (default: 400)")
    add("--batch", type=_count, default=16, metavar="N", help="sequences per step, over all ranks (default: 16)")
    add("--seq", type=_count, default=128, metavar="N", help="bytes per sequence (default: 128)")
    add("--lr", type=_rate, default=3e-3, metavar="X", help="highest learning rate (default: 0.003)")
    add("--seed", type=_seed, default=0, metavar="N", help="of parameters, batches and continuation (default: 0)")
    add("--dtype", choices=("fp32", "bf16"), help="to compute in (default: bf16 on GPUs, fp32 on CPUs)")
    add("--compile", action="store_true", help="compile the blocks; the first steps then take a minute or so")
    add("--out", type=Path, metavar="DIR", help="losses and checkpoints go there (default: runs/lm-1, runs/lm-2, ...)")
    add("--resume", action="store_true", help="go on from the last checkpoint in --out, or of the newest run")
    add("--save-every", type=_count, default=100, metavar="N", help="steps between checkpoints (default: 100)")
    add("--eval-every", type=_count, default=40, metavar="N", help="steps between evaluations (default: 40)")
    add("--prompt", type=os.fsencode, metavar="TEXT", help="what is continued at the end (default: some of the text)")
    return parser


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return rate


def _choose_folder(out: Path | None, *, is_resumed: bool) -> Path:
    """Where the run writes: a folder with no run in it, or, to resume, with one."""
    runs = sorted(RUNS.glob("lm-*"), key=_number)
    if is_resumed:
        folder = out or next((run for run in reversed(runs) if _has_run(run)), RUNS)
        if not _has_run(folder):
            raise SettingError("train_lm --resume", f"there is no checkpoint in {folder}.", "Name another --out.")
        return folder
    if out is not None and _has_run(out):
        raise SettingError("train_lm", f"--out {out} has a run in it already.", "Add --resume, or name another folder.")
    return out or RUNS / f"lm-{_number(runs[-1]) + 1 if runs else 1}"


def _has_run(folder: Path) -> bool:
    return any((folder / CHECKPOINTS).glob("step-*"))


def _number(folder: Path) -> int:
    digits = folder.name.removeprefix("lm-")
    return int(digits) if digits.isdecimal() else 0
