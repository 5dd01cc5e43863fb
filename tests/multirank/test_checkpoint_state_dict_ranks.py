"""torch's state dict functions on ranks: beside torch's own under fully_shard, and over tensor parallel and stages."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import disttrain
from disttrain import destroy_process_group, get_rank, init_device_mesh, init_process_group
from disttrain.checkpoint import load, load_full, save
from disttrain.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from disttrain.dtensor import DTensor
from disttrain.errors import StateDictError
from disttrain.fsdp2 import fully_shard
from disttrain.pipelining import split_blocks
from disttrain.process_group import current_world
from disttrain.store import PrefixStore
from disttrain.testing import RankPool, run_threads
from disttrain.tp import parallelize_module
from tests.cases.tensor_parallel import Decoder, decoder_plan

FULL = {"full_state_dict": True}
OPTIONS: list[dict[str, Any]] = [
    {},
    FULL,
    {**FULL, "cpu_offload": True},
    {"flatten_optimizer_state_dict": True},
    {**FULL, "flatten_optimizer_state_dict": True},
]


class Tied(nn.Sequential):
    """Of sizes that no number of ranks divides, with a tied weight."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Linear(7, 5), nn.Linear(7, 5))
        self[3].weight = self[2].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self[1](self[0](x))
        return self[2](hidden).square().sum() + self[3](hidden).sum()


def model(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return Tied()


def step(made: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    made(torch.linspace(-1, 1, 8).view(2, 4)).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def plain(value: Any) -> Any:
    """Comparable, whosesoever DTensors there are: what this rank has of each, and where."""
    if hasattr(value, "device_mesh"):
        return ["DTensor", [each.dim for each in value.placements], plain(value.to_local())]
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def sharded(made: nn.Module, *, by_torch: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    if by_torch:
        from torch.distributed.device_mesh import init_device_mesh as torch_mesh
        from torch.distributed.fsdp import fully_shard as torch_fully_shard

        mesh = torch_mesh("cpu", (disttrain.get_world_size(),))
        for part in (made[0], made):  # type: ignore[index]
            torch_fully_shard(part, mesh=mesh)
    else:
        for part in (made[0], made):  # type: ignore[index]
            fully_shard(part)
    return made, torch.optim.AdamW(made.parameters(), lr=0.125)


def register_with_torch() -> None:
    world = current_world("test")
    store, rank, size = world.store.clone(), world.rank, world.world_size
    destroy_process_group()
    init_process_group(
        store=PrefixStore("registered", store), rank=rank, world_size=size, timeout=30, register_with_torch=True
    )


def compare_with_torch() -> None:
    import torch.distributed.checkpoint.state_dict as theirs

    import disttrain.checkpoint.state_dict as ours

    register_with_torch()
    for flags in OPTIONS:
        for num_steps in (0, 1):
            found = []
            for module in (theirs, ours):
                made, optimizer = sharded(model(), by_torch=module is theirs)
                for _ in range(num_steps):
                    step(made, optimizer)
                options = module.StateDictOptions(**flags)  # type: ignore[attr-defined]
                states = module.get_state_dict(made, optimizer, options=options)  # type: ignore[attr-defined]
                found.append([plain(state) for state in states])
            assert found[0] == found[1], flags
    for flags in ({**FULL, "broadcast_from_rank0": True}, FULL):
        found = []
        for module in (theirs, ours):
            whole, its_optimizer = model(), None
            its_optimizer = torch.optim.AdamW(whole.parameters(), lr=0.5)
            step(whole, its_optimizer)
            states = copy.deepcopy(ours.get_state_dict(whole, its_optimizer))
            if "broadcast_from_rank0" in flags and get_rank() > 0:
                states = ({}, {})
            made, optimizer = sharded(model(5), by_torch=module is theirs)
            options = module.StateDictOptions(**flags)  # type: ignore[attr-defined]
            keys = module.set_model_state_dict(made, states[0], options=options)  # type: ignore[attr-defined]
            module.set_optimizer_state_dict(made, optimizer, states[1], options=options)  # type: ignore[attr-defined]
            found.append([plain(made.state_dict()), plain(optimizer.state_dict()), plain(list(keys))])
        assert found[0] == found[1], flags


def wrap_in_ddp() -> None:
    import torch.distributed.checkpoint.state_dict as theirs

    register_with_torch()
    made = nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.AdamW(made.parameters())
    step(made, optimizer)
    states = get_state_dict(made, optimizer)
    assert plain(states) == plain(theirs.get_state_dict(made, optimizer))
    assert "0.weight" in states[0]
    given = {name: torch.zeros_like(tensor) for name, tensor in states[0].items()}
    keys = set_state_dict(made, optimizer, model_state_dict=given, optim_state_dict=states[1])
    assert [list(names) for names in keys] == [[], []]
    assert not any(parameter.any() for parameter in made.parameters())


def test_ddp_is_not_in_the_names(rank_pool: RankPool) -> None:
    rank_pool.run(2, wrap_in_ddp, {})


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_results_are_torchs_under_fully_shard(rank_pool: RankPool, num_ranks: int) -> None:
    rank_pool.run(num_ranks, compare_with_torch, {})


def save_by_torchs_line(path: str) -> dict[str, Any]:
    made, optimizer = sharded(model())
    step(made, optimizer)
    model_state, optimizer_state = get_state_dict(made, optimizer)
    save({"model": model_state, "optim": optimizer_state}, checkpoint_id=path)
    return {"weight": made[2].weight.full_tensor().detach()}  # type: ignore[index]


def load_by_torchs_line(path: str) -> dict[str, Any]:
    made, optimizer = sharded(model(5))
    model_state, optimizer_state = get_state_dict(made, optimizer)
    state = {"model": model_state, "optim": optimizer_state}
    load(state, checkpoint_id=path)
    set_state_dict(made, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    weight = made[2].weight  # type: ignore[index]
    return {"weight": weight.full_tensor().detach(), "exp_avg": optimizer.state[weight]["exp_avg"].full_tensor()}


def test_torchs_own_lines_resume_on_other_ranks(rank_pool: RankPool, tmp_path: Path) -> None:
    saved, *_ = rank_pool.run(2, save_by_torchs_line, {"path": str(tmp_path / "save")})
    loaded, *_ = rank_pool.run(3, load_by_torchs_line, {"path": str(tmp_path / "save")})
    assert torch.equal(saved["weight"], loaded["weight"])
    assert loaded["exp_avg"].abs().sum() > 0
    kept = load_full(tmp_path / "save")["optim"]
    assert torch.equal(kept["state"]["2.weight"]["exp_avg"], loaded["exp_avg"])
    assert kept["param_groups"][0]["lr"] == 0.125


def test_over_two_axes_whole_and_back() -> None:
    torch.manual_seed(0)
    alone = Decoder(tied=True).double()
    expected = copy.deepcopy(alone.state_dict())

    def body() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        made = parallelize_module(copy.deepcopy(alone), mesh["tp"], decoder_plan(2, sequence=True))
        fully_shard(made, mesh=mesh["dp"])
        optimizer = torch.optim.AdamW(made.parameters())
        options = StateDictOptions(full_state_dict=True)
        whole, state = get_state_dict(made, optimizer, options=options)
        assert plain(whole) == plain(expected)
        changed = {name: tensor + 1 for name, tensor in whole.items()}
        for values in state["state"].values():
            values["exp_avg"] = values["exp_avg"] + torch.arange(values["exp_avg"].numel()).view_as(values["exp_avg"])
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        keys = set_state_dict(
            made,
            optimizer,
            model_state_dict=changed if get_rank() == 0 else {},
            optim_state_dict=state if get_rank() == 0 else {},
            options=options,
        )
        assert [list(names) for names in keys] == [[], []]
        assert all(isinstance(parameter, DTensor) for parameter in made.parameters())
        options = StateDictOptions(full_state_dict=True)
        assert plain(get_model_state_dict(made, options=options)) == plain(changed)
        assert plain(get_optimizer_state_dict(made, optimizer, options=options)) == plain(state)

    run_threads(4, body)


def test_stages_are_one_save(tmp_path: Path) -> None:
    """Flat: their lists of groups would be different values by one name."""
    torch.manual_seed(0)
    alone = Decoder(tied=False).double()
    flat = StateDictOptions(flatten_optimizer_state_dict=True)

    def body() -> None:
        stage = split_blocks(copy.deepcopy(alone), 2).stages[get_rank()]
        optimizer = torch.optim.AdamW(stage.parameters(), lr=0.5 + get_rank())
        model_state, state = get_state_dict(stage, optimizer, options=flat)
        save({"model": model_state, "optim": state}, tmp_path / "save")
        with torch.no_grad():
            for parameter in stage.parameters():
                parameter.zero_()
        again = torch.optim.AdamW(stage.parameters())
        model_state, state = get_state_dict(stage, again, options=flat)
        found = {"model": model_state, "optim": state}
        load(found, tmp_path / "save", allow=["unexpected"])
        set_state_dict(stage, again, model_state_dict=found["model"], optim_state_dict=found["optim"], options=flat)
        assert again.param_groups[0]["lr"] == 0.5 + get_rank()
        names = dict(stage.named_parameters())
        assert all(torch.equal(parameter, alone.get_parameter(name)) for name, parameter in names.items())

    run_threads(2, body)
    assert set(load_full(tmp_path / "save")["model"]) == set(alone.state_dict())


def test_what_rank_0_cannot_broadcast_all_hear_of() -> None:
    def body() -> None:
        made, optimizer = sharded(model())
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        given = {"0.weight": object()} if get_rank() == 0 else {}
        with pytest.raises(StateDictError, match="rank 0 cannot broadcast its state: a value cannot travel"):
            set_model_state_dict(made, given, options=options)
        with pytest.raises(StateDictError, match=r"rank 0 cannot broadcast its state: 0\.weight is a DTensor"):
            set_model_state_dict(made, made.state_dict(), options=options)
        with pytest.raises(StateDictError, match=r"size mismatch for 0\.weight"):
            set_model_state_dict(made, {"0.weight": torch.ones(3, 3)}, options=options)
        with pytest.raises(StateDictError, match="state dict is empty"):
            set_optimizer_state_dict(made, optimizer, {}, options=options)

    run_threads(2, body)


@pytest.mark.parametrize("flags", [FULL, {**FULL, "broadcast_from_rank0": True}])
def test_a_sharded_model_without_memory_is_given_some(flags: dict[str, Any]) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 7), nn.LayerNorm(7))
    rows = torch.linspace(-1, 1, 8).view(2, 4)
    expected = whole(rows)

    def body() -> None:
        with torch.device("meta"):
            made = nn.Sequential(nn.Linear(4, 7), nn.LayerNorm(7))
        for part in (made[0], made):
            fully_shard(part)
        given = whole.state_dict() if get_rank() == 0 or "broadcast_from_rank0" not in flags else {}
        set_model_state_dict(made, given, options=StateDictOptions(**flags))
        assert all(isinstance(parameter, DTensor) and not parameter.is_meta for parameter in made.parameters())
        assert torch.equal(made(rows), expected)

    run_threads(3, body)
