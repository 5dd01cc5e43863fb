"""How long pipeline schedules take to build, to lower and to verify, up to 128 ranks with 1,024 microbatches.

    python benchmarks/scale/schedules.py [--quick] [--large NAME...] [--json FILE]

Seconds of a process's CPU. The largest size is taken of the schedules of `--large`. torch's side builds the same
schedule, with its sends and receives where torch adds them; torch verifies nothing.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import OURS, TORCH, Row, command_line, finish, row

from disttrain.pipelining.passes import lower
from disttrain.pipelining.schedule.catalogue import SCHEDULE_KINDS, make_schedule
from disttrain.pipelining.schedule.verifier import verify

SIZE, LARGE_SIZE, QUICK_SIZE = (32, 256), (128, 1024), (16, 32)
LARGE = ("ZBVZeroBubble",)
QUICK = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
WHAT = ("build", "lower", "verify")
_TORCH = {"ZBVZeroBubble": "ScheduleZBVZeroBubble", "DualPipeV": "ScheduleDualPipeV"} | {
    name: f"Schedule{name}" for name in ("Interleaved1F1B", "InterleavedZeroBubble")
}


def rows(quick: bool, large: Sequence[str] = LARGE) -> list[Row]:
    """A row for each schedule, size and step; each schedule in a process of its own, for the sake of its memory."""
    if quick:
        return [each for name in QUICK for each in _rows(name, *QUICK_SIZE)]
    sizes = [(kind.name, *SIZE) for kind in SCHEDULE_KINDS] + [(name, *LARGE_SIZE) for name in large]
    return [each for size in sizes for each in _rows(*size)]


def _rows(name: str, num_ranks: int, num_microbatches: int) -> Iterator[Row]:
    case = f"{name}, {num_ranks} ranks x {num_microbatches} microbatches"
    ours = _in_a_process(OURS, name, num_ranks, num_microbatches)
    has_torch = name in _TORCH and (num_ranks, num_microbatches) != LARGE_SIZE
    theirs = _in_a_process(TORCH, name, num_ranks, num_microbatches) if has_torch else []
    for step, seconds in zip(WHAT, ours, strict=False):
        sides = {OURS: [seconds]} | ({TORCH: theirs[:1]} if step == "lower" and theirs else {})
        yield row(f"{step} {case}", "s of CPU", sides)
    yield row(case, "MiB at most", {OURS: ours[3:]})


def _in_a_process(side: str, name: str, num_ranks: int, num_microbatches: int) -> list[float]:
    words = [sys.executable, __file__, "--one", side, name, str(num_ranks), str(num_microbatches)]
    ran = subprocess.run(words, capture_output=True, text=True, check=True)
    return list(map(float, ran.stdout.split()))


def _measured(side: str, name: str, num_ranks: int, num_microbatches: int) -> list[float]:
    if side == TORCH:
        return [_torch_s(name, num_ranks, num_microbatches)]
    schedule = None

    def step(call: Callable[[], object]) -> float:
        nonlocal schedule
        start_s = time.process_time()
        schedule = call() or schedule
        return time.process_time() - start_s

    taken = [
        step(lambda: make_schedule(name, num_ranks, num_microbatches)),
        step(lambda: lower(schedule)),
        step(lambda: verify(schedule)),
    ]
    return [*taken, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]


def _torch_s(name: str, num_ranks: int, num_microbatches: int) -> float:
    """The actions of all ranks with their messages, as torch's runtime needs them."""
    from torch.distributed.pipelining import schedules  # loads torch, for its side only

    kind = getattr(schedules, _TORCH[name])
    made = kind.__new__(kind)
    made.pp_group_size = num_ranks
    made._n_microbatches = num_microbatches
    made._num_stages = 2 * num_ranks
    made.n_local_stages = 2
    made.num_stages = 2 * num_ranks
    made.rank = 0
    num_rounds = max(1, num_microbatches // num_ranks)
    made.number_of_rounds, made.microbatches_per_round = num_rounds, num_microbatches // num_rounds
    is_v = name in ("ZBVZeroBubble", "DualPipeV")
    home = {s: (s if s < num_ranks else 2 * num_ranks - 1 - s) if is_v else s % num_ranks for s in range(2 * num_ranks)}
    start_s = time.process_time()
    order = {rank: made._calculate_single_rank_operations(rank) for rank in range(num_ranks)}
    if name == "InterleavedZeroBubble":
        made.pipeline_order = order
        order = made._add_bubbles_to_actions(2 * num_ranks)
    actions = {
        rank: schedules._add_unshard_reshard([each for each in listed if each is not None])
        for rank, listed in order.items()
    }
    actions = {rank: schedules._add_reduce_grad(listed, num_microbatches) for rank, listed in actions.items()}
    schedules._add_send_recv(actions, stage_to_rank=home.__getitem__, num_stages=2 * num_ranks)
    return time.process_time() - start_s


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        side, name, *sizes = sys.argv[2:]
        print(*_measured(side, name, *map(int, sizes)))
        return
    parser = command_line(__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    names = [kind.name for kind in SCHEDULE_KINDS]
    parser.add_argument("--large", nargs="+", choices=names, default=LARGE, metavar="NAME", help=", ".join(names))
    options = parser.parse_args()
    finish(rows(options.quick, options.large), options.json)


if __name__ == "__main__":
    main()
