"""How many operations a step hands to the network, ours and torch's, of the same models, and which layer asks.

    disttrain-launch --standalone --nproc-per-node 4 benchmarks/operations.py [--only fsdp ...] [--json FILE]

Both are counted where they end: by what torch's profiler has seen Gloo do, on the first rank, once what is learnt in
the first two steps is known. Of ours `disttrain.count_collectives` says who asked. A step is forward, backward,
clipping with a look at the norm, and the optimizer's step; torch leaves some of a backward's reductions to these two.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from harness import OURS, TORCH, Row, command_line, finish, row
from models.cases import WAYS, Case
from models.model import Sizes
from pipeline_host import stepping
from torch import nn
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.device_mesh import init_device_mesh as torch_mesh

import disttrain
from disttrain import checkpoint, fsdp2
from disttrain.pipelining import make_schedule

SIZES = Sizes(dim=64, layers=3, heads=8, kv_heads=4, ffn=96, vocab=320, seq=32)
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble")
NUM_MICROBATCHES = 8
NUM_WARMUPS = 2
Step = Callable[[], object]
Parts = dict[str, Step]
"""What is counted, by its name; done in this order."""


@dataclass(frozen=True)
class Counted:
    """Of one part of a step on this rank: what Gloo did, and, of ours, what was counted at the door."""

    operations: int
    at_door: int
    table: str


def counted(step: Step) -> Counted:
    """Collective, as the step is."""
    # The device that records can begin to do so only once all is over.
    with torch.profiler.profile() as profile, disttrain.count_collectives() as counts:
        step()
    by_transport = sum(event.name.startswith("gloo:") for event in profile.events())
    return Counted(by_transport, counts.total.operations, str(counts))


def model_parts(model: nn.Module, forward_and_backward: Step) -> Parts:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def clip() -> float:
        return float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return {"forward, backward": forward_and_backward, "clipping": clip, "optimizer": step}


def llama(parallelism: str, library: str) -> Parts:
    case = Case(parallelism, WAYS["ours" if library == OURS else "torch"], SIZES, "cpu", 1e-4)
    tokens, targets = torch.randint(0, SIZES.vocab, (2, 2, SIZES.seq), generator=torch.Generator().manual_seed(0))
    return model_parts(case.model, lambda: case._loss_and_backward(tokens, targets))


def copies(library: str) -> Parts:
    """Sharded over pairs of ranks, and copied."""
    make: Callable[..., Any] = disttrain.init_device_mesh if library == OURS else torch_mesh
    shard: Any = (fsdp2 if library == OURS else torch_fsdp).fully_shard
    mesh = make("cpu", (disttrain.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)))
    for block in model:
        shard(block, mesh=mesh)
    shard(model, mesh=mesh)
    x = torch.randn(4, 16)
    return model_parts(model, lambda: model(x).square().mean().backward())


def pipeline(name: str, library: str) -> Parts:
    return {"step": stepping(library, make_schedule(name, disttrain.get_world_size(), NUM_MICROBATCHES))}


def sharded_linears(library: str) -> nn.Module:
    make: Callable[..., Any] = disttrain.init_device_mesh if library == OURS else torch_mesh
    shard: Any = (fsdp2 if library == OURS else torch_fsdp).fully_shard
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    shard(model, mesh=make("cpu", (disttrain.get_world_size(),)))
    return model


def saving(library: str) -> Parts:
    """A checkpoint of a sharded model, and its load; into a folder that all ranks share."""
    model = sharded_linears(library)
    folders = [tempfile.mkdtemp() if disttrain.get_rank() == 0 else ""]
    disttrain.broadcast_object_list(folders)
    path = Path(folders[0])
    numbers = iter(range(1000))

    def save() -> None:
        to = path / str(next(numbers))
        checkpoint.save(model.state_dict(), to) if library == OURS else torch_checkpoint.save(
            model.state_dict(), checkpoint_id=to
        )

    def load() -> None:
        state = model.state_dict()
        checkpoint.load(state, path / "0") if library == OURS else torch_checkpoint.load(
            state, checkpoint_id=path / "0"
        )

    return {"save": save, "load": load}


def whole_state(library: str) -> Parts:
    """All of a model's state on the first rank, and from there back."""
    model = sharded_linears(library)
    states: Any = checkpoint if library == OURS else torch_state_dict
    full = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    back = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    held: dict[str, Any] = {}
    return {
        "get": lambda: held.update(states.get_model_state_dict(model, options=full)),
        "set": lambda: states.set_model_state_dict(model, held, options=back),
    }


CASES: dict[str, Callable[[str], Parts]] = {
    **{name: partial(llama, name) for name in ("fsdp", "tp", "2d")},
    "hsdp": copies,
    **{name: partial(pipeline, name) for name in SCHEDULES},
    "checkpoint": saving,
    "state dict": whole_state,
}


def compare(name: str) -> Iterator[tuple[str, dict[str, Counted]]]:
    """The parts of a case, each counted for both libraries. Collective."""
    found = {}
    for library in (OURS, TORCH):
        parts = CASES[name](library)
        for _ in range(NUM_WARMUPS):
            for part in parts.values():
                part()
        found[library] = {part: counted(step) for part, step in parts.items()}
    for part in found[OURS]:
        yield part, {library: found[library][part] for library in found}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    disttrain.init_process_group("gloo")
    torch.distributed.init_process_group("gloo")
    rows: list[Row] = []
    for name in options.only:
        for part, sides in compare(name):
            values = {library: [float(side.operations)] for library, side in sides.items()}
            rows.append(row(f"{name}: {part}", "operations", values))
            if disttrain.get_rank() == 0:
                print(f"{name}, {part}\n{sides[OURS].table}\n", flush=True)
    if disttrain.get_rank() == 0:
        finish(rows, options.json)
    torch.distributed.destroy_process_group()
    disttrain.destroy_process_group()


if __name__ == "__main__":
    main()
