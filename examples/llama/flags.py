"""The command line of `train_llama.py`, the file of it (`--config`), and what is wrong with either in one line."""

from __future__ import annotations

import argparse
import json
import math
import sys
import tomllib
from argparse import ArgumentTypeError, BooleanOptionalAction, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from disttrain import settings
from disttrain.command_line import Parser, explained
from disttrain.errors import ScheduleError, SettingError
from disttrain.pipelining import Schedule, get_schedule_class, make_schedule
from llama.config import PRESETS, LlamaConfig, config_named, with_experts
from llama.huggingface import CONFIG, read_config
from llama.meshes import MeshPlan, check_fit, parse_mesh
from llama.parallel import DTYPES
from llama.trackers import TRACKERS

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

RUNS = Path("runs")
CHECKPOINTS = "checkpoints"
MEMO = "flags.json"
FIXED = ("model", "experts", "top_k", "shared_experts", "data", "tokenizer", "seq", "seed")
"""What a run keeps until its end: a resumed run with another value would be another run."""
CHANGEABLE = (
    "steps",
    "batch",
    "lr",
    "dtype",
    "compile",
    "capture",
    "kernels",
    "recompute",
    "reduce_each",
    "track",
    "save_every",
    "eval_every",
)
"""What a resumed run takes on as well, unless told otherwise. The mesh it is told anew, as the ranks are."""


class _Parser(Parser):
    """Every rank finds the same mistake, and raises; one of them will say it. Help is for one rank to print, too."""

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        if (settings.RANK.read() or 0) == 0:
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        raise SettingError("train_llama", explained(self, message), "See --help.")


def parse(arguments: Sequence[str] | None, num_ranks: int) -> Namespace:
    """The flags, checked, with `out` resolved to a folder; a run that is resumed has its own flags back.

    `mesh` is a MeshPlan, and beside the flags there are `sizes`, a LlamaConfig, and `plan`, the pipeline's Schedule or
    None. When the launcher has started the job's workers again, the run in --out is resumed without being asked for.
    Raises: SettingError.
    """
    parser = _parser()
    given = list(sys.argv[1:] if arguments is None else arguments)
    given = [*_from_file(parser.parse_args(given).config), *given]
    flags = parser.parse_args(given)
    if flags.auto_resume and flags.out is None:
        raise SettingError("train_llama", "--auto-resume needs a folder to look in.", "Give --out.")
    if (flags.auto_resume or settings.ROUND.read()) and flags.out is not None:
        flags.resume |= has_run(flags.out)
    out = _choose_folder(flags.out, is_resumed=flags.resume)
    saved: dict[str, Any] = {}
    if flags.resume:
        saved = json.loads((out / MEMO).read_text(encoding="utf-8"))
        parser.set_defaults(**saved, resume=True)
        flags = parser.parse_args(given)
    for name in FIXED if saved else ():
        if name in saved and getattr(flags, name) != saved[name]:
            problem = f"the run in {out} has --{name} {saved[name]}, not {getattr(flags, name)}."
            raise SettingError("train_llama --resume", problem, f"Leave --{name} out, or start another run.")
    if flags.export is not None and flags.export.exists():
        raise SettingError("train_llama --export", f"{flags.export} is there already.", "Name a new folder.")
    if flags.export is not None and flags.experts:
        problem = "a Llama with experts has no form of Hugging Face's."
        raise SettingError("train_llama --export", problem, "Leave --export out: the checkpoint has all weights.")
    flags.out = out
    flags.sizes = _sizes(flags)
    flags.mesh = parse_mesh(flags.mesh, num_ranks)
    flags.plan, flags.microbatches = _schedule(flags, flags.mesh, flags.sizes)
    check_fit(flags.mesh, flags.sizes, batch_size=flags.batch, seq_size=flags.seq, num_microbatches=flags.microbatches)
    return flags


def save(flags: Namespace) -> None:
    """Make the run's folder, with the flags in it that resuming it takes."""
    flags.out.mkdir(parents=True, exist_ok=True)
    # Renamed, so that a run that is killed while it is resumed can still be.
    beside = flags.out / f"{MEMO}.new"
    beside.write_text(json.dumps(kept(flags), indent=1) + "\n", encoding="utf-8")
    beside.replace(flags.out / MEMO)


def kept(flags: Namespace) -> dict[str, Any]:
    """What a run is told once, and has until its end."""
    return {name: getattr(flags, name) for name in FIXED + CHANGEABLE}


def _parser() -> _Parser:
    parser = _Parser(prog="train_llama.py", description="Train a Llama on text.")
    add = parser.add_argument
    flag = BooleanOptionalAction
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help="TOML with any of these, by their names; the command line comes first",
    )
    add("--data", metavar="DIR", help="folder of text or of shards (default: the source of Python's standard library)")
    add("--tokenizer", default="bytes", metavar="FILE", help="a tokenizer.json, or bytes (the default)")
    sizes = f"{', '.join(PRESETS)}, sizes as dim=64,num_layers=2,..., or a folder in Hugging Face's form"
    add("--model", default="small", metavar="M", help=f"{sizes}, whose weights are taken as well (default: small)")
    add(
        "--experts", type=_whole, default=0, metavar="N", help="in the place of each feed-forward layer (default: none)"
    )
    add("--top-k", type=_count, default=2, metavar="K", help="experts of a token, of a size that fits (default: 2)")
    add("--shared-experts", type=_whole, default=0, metavar="S", help="which every token goes through (default: 0)")
    add("--mesh", metavar="AXES", help="such as dp=2,tp=2,pp=2 or dp=2,ep=2 (default: all ranks along dp)")
    add("--schedule", default="1F1B", metavar="NAME", help="of the pipeline, where there is one (default: 1F1B)")
    add("--stages-per-rank", type=_count, metavar="N", help="of the pipeline (default: what the schedule takes)")
    add("--microbatches", type=_count, metavar="N", help="parts of a rank's rows (default: 1, or 2 for each pp)")
    add("--steps", type=_count, default=400, metavar="N", help="optimizer steps in all (default: 400)")
    add("--batch", type=_count, default=16, metavar="N", help="sequences per step, over all ranks (default: 16)")
    add("--seq", type=_count, default=128, metavar="N", help="tokens per sequence (default: 128)")
    add("--lr", type=_rate, default=3e-3, metavar="X", help="highest learning rate (default: 0.003)")
    add("--seed", type=_whole, default=0, metavar="N", help="of parameters, batches and continuation (default: 0)")
    add("--dtype", choices=DTYPES, help="to compute in (default: bf16 on GPUs, fp32 on CPUs)")
    add("--kernels", action=flag, default=False, help="fused kernels for norms, products, the loss and the optimizer")
    add(
        "--recompute", action=flag, default=False, help="keep blocks' inputs only, and compute them again (less memory)"
    )
    add(
        "--reduce-each",
        action=flag,
        default=False,
        help="reduce gradients after each microbatch, not the last (less memory)",
    )
    add("--compile", action=flag, default=False, help="compile the blocks; the first steps then take a minute or so")
    add(
        "--capture",
        choices=("auto", "on", "off"),
        default="auto",
        help="launch the whole step as one CUDA graph (default: auto, on GPUs)",
    )
    add("--out", type=Path, metavar="DIR", help="losses and checkpoints go there (default: runs/llama-1, ...)")
    add("--resume", action="store_true", help="go on from the last checkpoint in --out, or of the newest run")
    add("--auto-resume", action="store_true", help="--resume where --out has a run: for jobs that are requeued")
    add("--save-every", type=_whole, default=100, metavar="N", help="steps between checkpoints (default: 100; 0: none)")
    add("--eval-every", type=_count, default=40, metavar="N", help="steps between evaluations (default: 40)")
    add("--track", type=_track, default="", metavar="NAMES", help=f"write the numbers for {', '.join(TRACKERS)}, too")
    add("--profile", type=Path, metavar="FILE", help="profile the 3 steps after the 5th: a trace of all ranks, a table")
    add("--export", type=Path, metavar="DIR", help="write the weights there at the end, in Hugging Face's form")
    add("--prompt", metavar="TEXT", help="what is continued at the end (default: some of the text)")
    add("--sample", type=_whole, default=240, metavar="N", help="tokens of the continuation (default: 240)")
    return parser


def _from_file(path: Path | None) -> list[str]:
    """A file's entries as a command line. Tables are for the reader's eyes; [model] may have sizes in it."""
    if path is None:
        return []
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # no TOML, or no text
        problem = error.strerror if isinstance(error, OSError) else error
        raise SettingError("train_llama --config", f"{path}: {problem}.", "Name a TOML file.") from error
    line: list[str] = []
    for name, value in entries.items():
        if name == "model" and isinstance(value, dict):
            line.append("--model=" + ",".join(f"{size}={number}" for size, number in value.items()))
        else:
            line += [_as_flag(*entry) for entry in (value.items() if isinstance(value, dict) else [(name, value)])]
    return line


def _track(text: str) -> str:
    if unknown := [name for name in text.split(",") if name and name not in TRACKERS]:
        raise ArgumentTypeError(f"{', '.join(unknown)} is none of {', '.join(TRACKERS)}")
    return text


def _as_flag(name: str, value: object) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag}={value}"


def is_folder(model: str) -> bool:
    """Whether `--model` names one in Hugging Face's form."""
    return (Path(model) / CONFIG).is_file()


def _sizes(flags: Namespace) -> LlamaConfig:
    model = flags.model
    config = read_config(Path(model)) if is_folder(model) else config_named(model)
    if not flags.experts:
        return config
    if is_folder(model):
        raise SettingError("train_llama --experts", f"{model} has weights of its own.", "Name a preset, or sizes.")
    return with_experts(config, flags.experts, flags.top_k, flags.shared_experts)


def _schedule(flags: Namespace, mesh: MeshPlan, sizes: LlamaConfig) -> tuple[Schedule | None, int]:
    """The pipeline's plan, where there is one, and the number of microbatches."""
    has_stages = mesh.pp > 1
    num_microbatches = flags.microbatches or (2 * mesh.pp if has_stages else 1)
    try:
        if not has_stages:
            get_schedule_class(flags.schedule)  # what is no name is told also where it changes nothing
            return None, num_microbatches
        plan = make_schedule(flags.schedule, mesh.pp, num_microbatches, flags.stages_per_rank)
    except ScheduleError as error:
        raise SettingError("train_llama --schedule", error.problem, error.remedy) from error
    if plan.name == "ForwardOnly":
        raise SettingError("train_llama --schedule", f"{plan.name} trains nothing.", "Take 1F1B, say.")
    if plan.num_stages > sizes.num_layers:
        problem = f"{plan.name} on pp={mesh.pp} has {plan.num_stages} stages, the model {sizes.num_layers} layers."
        raise SettingError("train_llama --schedule", problem, "Take another schedule, a smaller pp, or more layers.")
    if sizes.is_tied and plan.placement.ranks[0] == plan.placement.ranks[-1]:
        problem = f"{plan.name} has the first and the last stage on one rank, each with a copy of the tied matrix."
        raise SettingError("train_llama --schedule", problem, "Take one with them apart: 1F1B or Interleaved1F1B, say.")
    return plan, num_microbatches


def _whole(text: str) -> int:
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
    runs = sorted(RUNS.glob("llama-*"), key=_number)
    if is_resumed:
        folder = out or next((run for run in reversed(runs) if has_run(run)), RUNS)
        if not has_run(folder):
            raise SettingError("train_llama --resume", f"there is no checkpoint in {folder}.", "Name another --out.")
        return folder
    if out is not None and has_run(out):
        raise SettingError("train_llama", f"--out {out} has a run in it.", "Add --resume, or name another folder.")
    return out or RUNS / f"llama-{_number(runs[-1]) + 1 if runs else 1}"


def has_run(folder: Path) -> bool:
    """Whether there is a save that is whole: one that has died, or is being written, has more to its name."""
    return any(path.name.removeprefix("step-").isdecimal() for path in (folder / CHECKPOINTS).glob("step-*"))


def _number(folder: Path) -> int:
    digits = folder.name.removeprefix("llama-")
    return int(digits) if digits.isdecimal() else 0
