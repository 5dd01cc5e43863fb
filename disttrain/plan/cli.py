"""`python -m disttrain.plan`: which meshes fit, what each takes, which is the fastest, how to run it. Torch-free."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from disttrain.command_line import Parser
from disttrain.console import write
from disttrain.doctor.links import read_links
from disttrain.errors import DisttrainError, ScheduleError, SettingError
from disttrain.pipelining.pictures import draw_svg
from disttrain.pipelining.schedule.catalogue import find_schedule_kind
from disttrain.plan.job import AXES, MIXED, PURE, Choice, Job, MeshSizes
from disttrain.plan.model.experts import ExpertAssumptions
from disttrain.plan.model.named import PRESETS, mixture_names
from disttrain.plan.model.read import read_sizes
from disttrain.plan.report import as_json, as_text
from disttrain.plan.search import SCHEDULES, find_plans
from disttrain.plan.time.hardware import HARDWARE, Hardware, read_hardware, to_json
from disttrain.plan.time.times import timeline_of

NOTHING_FITS = 1
USAGE = 2
_PRECISIONS = {precision.name: precision for precision in (MIXED, PURE)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, 1 when nothing fits, 2 when it was called wrongly."""
    options = _parser().parse_args(argv)
    try:
        return _measure(options) if options.measure else _plan(options)
    except DisttrainError as error:
        print(error, file=sys.stderr)  # noqa: T201
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        print(f"disttrain.plan: {named}{error.strerror}.", file=sys.stderr)  # noqa: T201
    except KeyboardInterrupt:
        return 130
    return USAGE


def _plan(options: argparse.Namespace) -> int:
    for name in ("model", "gpus"):
        if getattr(options, name) is None:
            raise SettingError("plan", f"--{name} is missing.", "See --help.")
    job = _job(options)
    mesh = None if options.mesh is None else _mesh(options.mesh, job.num_gpus)
    plans = find_plans(job, num_plans=options.top, schedules=options.schedule or SCHEDULES, mesh=mesh)
    write(as_text(plans, options.model))
    if options.json:
        options.json.write_text(json.dumps(as_json(plans, options.model), indent=1) + "\n", encoding="utf-8")
    if options.svg and plans.plans:
        options.svg.write_text(_picture(job, plans.plans[0].choice), encoding="utf-8")
    return 0 if plans.plans else NOTHING_FITS


def _picture(job: Job, choice: Choice) -> str:
    if choice.schedule is None:
        raise SettingError("plan --svg", f"{choice.mesh} has no pipeline to be drawn.", "Give a --mesh that has one.")
    return draw_svg(timeline_of(job, choice))


def _measure(options: argparse.Namespace) -> int:
    from disttrain.plan.time.measure import measure  # loads torch

    measured = measure(_hardware(options))
    if measured is not None:
        options.measure.write_text(to_json(measured), encoding="utf-8")
        write(to_json(measured).rstrip())
    return 0


def _job(options: argparse.Namespace) -> Job:
    num_sequences, left_over = divmod(options.batch_tokens, options.seq)
    if left_over or not num_sequences:
        problem = f"--batch-tokens {options.batch_tokens} is no multiple of --seq {options.seq}."
        raise SettingError("plan", problem, f"Give {max(1, num_sequences) * options.seq}, say.")
    return Job(
        read_sizes(options.model, options.vocab),
        options.gpus,
        _hardware(options),
        node_size=min(options.node_size, options.gpus),
        seq_size=options.seq,
        num_sequences=num_sequences,
        memory_share=options.memory_share,
        precision=_PRECISIONS[options.precision],
        has_kernels=options.kernels,
        may_compile=options.compile,
        captures=options.capture,
        uses_float8=options.float8,
        assumed=ExpertAssumptions(
            options.imbalance, options.exchange_bytes, options.once_per_host, options.hidden_exchange
        ),
    )


def _hardware(options: argparse.Namespace) -> Hardware:
    giga = {"memory_bytes_per_s": options.memory_gb, "node_bytes_per_s": options.node_gb}
    giga["network_bytes_per_s"] = options.network_gb
    changes = {name: None if value is None else 1e9 * value for name, value in giga.items()}
    changes["matmul_flops"] = None if options.tflops is None else 1e12 * options.tflops
    hardware = read_hardware(options.hardware)
    if options.links is not None:
        hardware = hardware.with_links(read_links(options.links))
    return hardware.with_changes(memory_gib=options.gpu_memory, **changes)


def _mesh(text: str, num_gpus: int) -> MeshSizes:
    """`dp=8,tp=4`, in any order."""
    axis_sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if name not in AXES or name in axis_sizes or not size.isdecimal() or int(size) < 1:
            problem = f"{text!r} is no mesh, because of {part.strip()!r}."
            raise SettingError("plan --mesh", problem, f"Axes are {', '.join(AXES)}, each once: dp=8,tp=4.")
        axis_sizes[name] = int(size)
    mesh = MeshSizes(**axis_sizes)
    if mesh.num_gpus != num_gpus:
        raise SettingError(
            "plan --mesh", f"{text!r} has {mesh.num_gpus} places, --gpus is {num_gpus}.", "Make them agree."
        )
    return mesh


def _parser() -> Parser:
    parser = Parser(
        prog="python -m disttrain.plan",
        description="Which meshes fit a Llama, or a mixture of experts, on so many GPUs, what each takes, and which is "
        "the fastest.",
    )
    add, flag = parser.add_argument, argparse.BooleanOptionalAction
    names = ", ".join([*PRESETS, *mixture_names()])
    models = f"{names}, sizes as dim=N,num_layers=N,..., a TOML or JSON file, or a folder with a config.json"
    add("--model", metavar="M", help=models)
    add("--vocab", metavar="N", type=_count, help="size of the vocabulary, where the model does not say it")
    add("--gpus", metavar="N", type=_count)
    add("--gpu-memory", metavar="GIB", type=_positive, help="of each (default: the hardware's)")
    add("--memory-share", metavar="X", type=float, default=0.9, help="that tensors may take of it (default: 0.9)")
    add("--node-size", metavar="N", type=_count, default=8, help="GPUs with fast links to each other (default: 8)")
    add("--seq", metavar="N", type=_count, default=8192, help="tokens of a sequence (default: 8192)")
    add("--batch-tokens", metavar="N", type=_count, default=2**22, help="tokens of a step (default: 4194304)")
    add("--mesh", metavar="AXES", help="look at this mesh alone, such as pp=2,dp=8,tp=4")
    add(
        "--schedule",
        metavar="NAME",
        type=_schedule,
        action="append",
        help=f"of a pipeline, also several times (default: {', '.join(SCHEDULES)})",
    )
    add("--precision", choices=_PRECISIONS, default="mixed", help="mixed: fp32 parameters, computed with in bf16")
    add("--kernels", action=flag, default=True, help="fused kernels (default: yes)")
    add("--compile", action=flag, default=True, help="compiled blocks, where the schedule gains by them (default: yes)")
    add("--capture", action=flag, default=True, help="steps captured, each one launch of the host (default: yes)")
    add("--float8", action=flag, default=False, help="products of blocks in float8 (default: no)")
    add("--top", metavar="N", type=_count, default=5, help="how many meshes to list (default: 5)")
    add("--svg", metavar="FILE", type=Path, help="draw the first one's pipeline, of its first microbatches")
    add("--json", metavar="FILE", type=Path, help="write all that was found")
    mixture = parser.add_argument_group("experts", "what a run decides, of a model that has some")
    mixture.add_argument(
        "--imbalance",
        metavar="X",
        type=_positive,
        default=ExpertAssumptions.imbalance,
        help=f"rows of the rank that has most, over the mean (default: {ExpertAssumptions.imbalance:g})",
    )
    mixture.add_argument(
        "--exchange-bytes",
        metavar="N",
        type=_count,
        help="of an element on its way to an expert (default: as computed)",
    )
    mixture.add_argument(
        "--once-per-host",
        action=flag,
        default=False,
        help="a token goes once to each host that has some of its experts (default: once for each expert)",
    )
    mixture.add_argument(
        "--hidden-exchange", metavar="X", type=float, default=0.0, help="share of its time under products (default: 0)"
    )
    machine = parser.add_argument_group("hardware", "rates that are attained, not those of a data sheet")
    machine.add_argument(
        "--hardware", metavar="NAME", default="h100", help=f"{', '.join(HARDWARE)}, or a file (default: h100)"
    )
    machine.add_argument("--tflops", metavar="X", type=_positive, help="of products in bfloat16")
    machine.add_argument("--memory-gb", metavar="X", type=_positive, help="GB/s of a copy in a GPU's memory")
    machine.add_argument("--node-gb", metavar="X", type=_positive, help="GB/s that a GPU sends within its node")
    machine.add_argument("--network-gb", metavar="X", type=_positive, help="GB/s that a GPU sends to other nodes")
    machine.add_argument(
        "--links",
        metavar="FILE",
        type=Path,
        help="between nodes, as disttrain-launch doctor --links FILE measures them",
    )
    machine.add_argument(
        "--measure", metavar="FILE", type=Path, help="measure these GPUs, and write FILE for --hardware"
    )
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def _schedule(text: str) -> str:
    """Refused before anything is worked out."""
    try:
        name = find_schedule_kind(text).name
        if name == "ForwardOnly":
            raise argparse.ArgumentTypeError("ForwardOnly trains nothing")
        return name
    except ScheduleError as error:
        raise argparse.ArgumentTypeError(f"{error.problem} {error.remedy}") from None
