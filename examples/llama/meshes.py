"""`--mesh dp=2,tp=2,pp=2`: how many ranks lie along each axis, and who has which rows of a batch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch

import disttrain
from disttrain.errors import SettingError
from llama.config import LlamaConfig


@dataclass(frozen=True)
class MeshPlan:
    """The sizes of the axes, outermost first: neighbouring ranks, which talk fastest, share layers.

    pp         stages of the model, one after the other
    replicate  copies of what the ranks along dp have between them (hybrid sharding)
    dp         parts of the batch; parameters are cut, and gathered where they are used
    ep         parts of the batch, too; each rank has other experts, to which tokens are sent. All other parameters are
               cut over dp and ep
    cp         parts of each sequence, all of which have the batch's rows; parameters are cut over dp, ep and cp
    tp         parts of each layer
    """

    pp: int = 1
    replicate: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def num_replicas(self) -> int:
        """Into how many parts the batch is cut."""
        return self.replicate * self.dp * self.ep

    def __str__(self) -> str:
        used = [f"{name}={size}" for name, size in asdict(self).items() if size > 1]
        return ",".join(used) or "dp=1"


def parse_mesh(text: str | None, num_ranks: int) -> MeshPlan:
    """Axes and their sizes, in any order; `dp`, when it is left out, takes the ranks that are left.

    Raises: SettingError for other axes, and where the sizes do not make the number of ranks.
    """
    sizes: dict[str, int] = {}
    for part in text.split(",") if text else ():
        name, _, size = part.strip().partition("=")
        if name not in asdict(MeshPlan()) or name in sizes or not size.isdecimal() or int(size) == 0:
            axes = "Axes are dp, replicate, ep, cp, tp and pp, each once and 1 or more: dp=2,tp=2,pp=2."
            raise SettingError("train_llama --mesh", f"{text!r} is no mesh, because of {part.strip()!r}.", axes)
        sizes[name] = int(size)
    others = math.prod(size for name, size in sizes.items() if name != "dp")
    plan = MeshPlan(**{"dp": max(1, num_ranks // others), **sizes})
    num_places = math.prod(asdict(plan).values())
    if num_places != num_ranks:
        problem = f"{text!r} has {num_places} places, the job {num_ranks} ranks."
        raise SettingError("train_llama --mesh", problem, "Start as many ranks, or leave dp out, which takes the rest.")
    return plan


def check_fit(plan: MeshPlan, config: LlamaConfig, *, batch_size: int, seq_size: int, num_microbatches: int) -> None:
    """Raises SettingError where model or batch cannot be cut by the mesh."""
    by_rows = f"{plan.num_replicas} ranks along dp, ep and replicate, {num_microbatches} microbatches each,"
    by_positions = f"cp={plan.cp} and tp={plan.tp}" if plan.cp > 1 else f"tp={plan.tp}"
    rules = [
        (f"tp={plan.tp}", plan.tp, "heads", config.num_heads),
        (f"tp={plan.tp}", plan.tp, "hidden_size", config.hidden_size),
        (f"tp={plan.tp}", plan.tp, "expert_size", config.expert_size),
        (by_positions, plan.cp * plan.tp if plan.tp > 1 else 1, "--seq", seq_size),
        (by_rows, plan.num_replicas * num_microbatches, "--batch", batch_size),
    ]
    for who, number, what, size in rules:
        if size % number:
            problem = f"{who} cannot share {what} {size} evenly."
            raise SettingError("train_llama", problem, f"Give a multiple of {number}, or another --mesh.")
    if plan.ep > max(1, config.num_experts):
        problem = f"ep={plan.ep} is more ranks than the model has experts, {config.num_experts}."
        raise SettingError("train_llama --mesh", problem, "Give a smaller ep, or more --experts.")
    if plan.cp > seq_size:
        problem = f"cp={plan.cp} is more ranks than a sequence has positions, {seq_size}."
        raise SettingError("train_llama --mesh", problem, "Give a smaller cp, or a larger --seq.")
    kv_heads, tp = config.num_kv_heads, plan.tp
    if kv_heads % tp and tp % kv_heads:
        problem = f"{kv_heads} heads of keys and values cannot be shared by tp={tp}."
        raise SettingError("train_llama", problem, "One must divide the other.")


def make_mesh(plan: MeshPlan, device: torch.device) -> disttrain.DeviceMesh:
    """All axes, those of one rank too, and dp, ep and cp as one, `shards`."""
    sizes = asdict(plan)
    mesh = disttrain.init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    mesh["dp", "ep", "cp"]._flatten("shards")
    return mesh


def token_axis(mesh: disttrain.DeviceMesh) -> disttrain.DeviceMesh:
    """The ranks whose experts' layers see different tokens, as one axis: tp, too, cuts sequences between layers."""
    return mesh["replicate", "dp", "ep", "cp", "tp"]._flatten("tokens")
