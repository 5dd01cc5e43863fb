"""A made-up job of many ranks on a mesh, as its dumps: steps of training, then a hang."""

from __future__ import annotations

import random

from disttrain.flight_recorder.dumps.dump import Dump
from disttrain.flight_recorder.record.record import CallSite, Frame, GroupProgress, Record, Stack, State, ThreadStack

PACKAGE = "/venv/lib/python3.11/site-packages/disttrain/"
LIBRARIES = ("/venv/lib/python3.11/site-packages/", "/usr/lib/python3.11/")
NOW_S = 1_760_000_000.0
_LOOP = (Frame("/home/ada/lm/train.py", 118, "train_epoch"), Frame("/home/ada/lm/train.py", 164, "main"))
_BACKWARD = (
    Frame(f"{LIBRARIES[0]}torch/autograd/graph.py", 841, "_engine_run_backward"),
    Frame(f"{LIBRARIES[0]}torch/_tensor.py", 648, "Tensor.backward"),
    Frame("/home/ada/lm/train.py", 97, "train_step"),
    *_LOOP,
)
_FORWARD = (
    Frame("/home/ada/lm/model.py", 71, "Block.forward"),
    Frame(f"{LIBRARIES[0]}torch/nn/modules/module.py", 1787, "Module._call_impl"),
    Frame("/home/ada/lm/train.py", 94, "train_step"),
    *_LOOP,
)
_CLIP: Stack = (Frame("/home/ada/lm/train.py", 103, "clip"), Frame("/home/ada/lm/train.py", 99, "train_step"), *_LOOP)
_LOAD: Stack = (
    Frame("/usr/lib/python3.11/socket.py", 718, "SocketIO.readinto"),
    Frame(f"{LIBRARIES[0]}datastore/client.py", 212, "Shard.fetch"),
    Frame("/home/ada/lm/data.py", 58, "Batches.__next__"),
    *_LOOP,
)
_IN_WAIT = (
    Frame(f"{PACKAGE}process_group/work.py", 96, "Work.wait"),
    Frame(f"{PACKAGE}process_group/door.py", 70, "issue"),
)


def job(num_ranks: int = 8, num_steps: int = 12, num_blocks: int = 6, stuck_rank: int = 5) -> list[Dump]:
    """Ranks on a mesh of dp x 2: gathers and reductions along dp, sums along tp. `stuck_rank` ends up fetching data."""
    dice = random.Random(7)
    time_s = dict.fromkeys(range(num_ranks), NOW_S - 60)
    made = {rank: _Rank(rank, num_ranks) for rank in range(num_ranks)}

    def together(ranks: tuple[int, ...], last_s: float, call: tuple[str, str, int, Stack, str]) -> None:
        start_s = max(time_s[rank] for rank in ranks)
        for rank in ranks:
            made[rank].call(call, ranks, time_s[rank], start_s + last_s)
            time_s[rank] = start_s + last_s

    columns = [tuple(range(column, num_ranks, 2)) for column in range(2)]
    for step in range(num_steps):
        for place in range(2 * num_blocks):
            module, stack = f"layers.{place % num_blocks}", _FORWARD if place < num_blocks else _BACKWARD
            for rank in time_s:
                slow = 2.2 if rank == stuck_rank and step % 4 == 3 else 1.0
                time_s[rank] += dice.uniform(0.003, 0.005) * slow
            for ranks in columns:
                together(ranks, 0.002, ("all_gather_into_tensor", "dp", 4096, stack, module))
            for row in range(0, num_ranks, 2):
                together((row, row + 1), 0.001, ("all_reduce", "tp", 8192, stack, f"{module}.mlp"))
            for ranks in columns if stack is _BACKWARD else ():
                together(ranks, 0.003, ("reduce_scatter_tensor", "dp", 4096, stack, module))
        if step + 1 < num_steps:
            together(tuple(range(num_ranks)), 0.001, ("all_reduce", "", 1, _CLIP, ""))
    everybody = tuple(range(num_ranks))
    for rank in everybody:
        if rank != stuck_rank:
            made[rank].call(("all_reduce", "", 1, _CLIP, ""), everybody, time_s[rank] + dice.uniform(0, 0.002), None)
    dumped_s = max(time_s.values()) + 31.5
    return [rank.dump(dumped_s, rank.rank == stuck_rank) for rank in made.values()]


class _Rank:
    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.skew_s = 0.0 if rank < world_size // 2 else 2.25
        self.records: list[Record] = []
        self.progress: dict[str, GroupProgress] = {}
        self.sites: dict[tuple[object, ...], CallSite] = {}

    def call(
        self, call: tuple[str, str, int, Stack, str], ranks: tuple[int, ...], begun_s: float, ended_s: float | None
    ) -> None:
        operation, axis_name, size, stack, module = call
        name = f"{axis_name}-{ranks[0]}" if axis_name else "world"
        sequence = self.progress[name].last_sequence + 1 if name in self.progress else 1
        self.progress[name] = GroupProgress(name, ranks, sequence, axis_name)
        site = CallSite(
            name, ranks, operation, ((size,),), ((size,),), ("bfloat16" if size > 1 else "float32",), None, stack
        )
        site = self.sites.setdefault((name, operation, stack), site)
        state = State.ENQUEUED if ended_s is None else State.COMPLETED
        own_s = None if ended_s is None else ended_s - self.skew_s
        self.records.append(Record(site, sequence, state, begun_s - self.skew_s, own_s, None, "", module))

    def dump(self, dumped_s: float, is_stuck: bool) -> Dump:
        stack = _LOAD if is_stuck else (*_IN_WAIT, *self.records[-1].site.stack)
        queue = (Frame("/usr/lib/python3.11/threading.py", 327, "Condition.wait"),)
        return Dump(
            rank=self.rank,
            world_size=self.world_size,
            job="1f2e3d4c",
            host=f"node{2 * self.rank // self.world_size}",
            pid=4100 + self.rank,
            started_s=NOW_S - 90 - self.skew_s,
            dumped_s=dumped_s - self.skew_s,
            reason="rank 0 has waited for 30 s",
            versions={"disttrain": "0.1.0", "torch": "2.13.0", "python": "3.11.2"},
            package=PACKAGE,
            libraries=LIBRARIES,
            clock_offset_s=self.skew_s if self.rank else None,
            clock_error_s=0.0002 if self.rank else None,
            groups=tuple(self.progress.values()),
            threads=(ThreadStack("MainThread", True, stack), ThreadStack("pin memory", False, queue)),
            records=tuple(self.records),
        )
