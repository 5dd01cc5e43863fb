"""Other formats on real ranks: written by some, read by others, on any mesh, and each rank reads what it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from disttrain import (
    destroy_process_group,
    get_rank,
    get_world_size,
    init_device_mesh,
    init_process_group,
)
from disttrain.checkpoint import Checkpointer, PerRank, load, load_full, save, set_training_state, training_state
from disttrain.checkpoint.interop import (
    convert,
    load_dcp,
    load_safetensors,
    save_dcp,
    save_safetensors,
    torch_optimizer_names,
)
from disttrain.dtensor import Replicate, Shard, distribute_tensor
from disttrain.errors import CheckpointError
from disttrain.fsdp2 import fully_shard
from disttrain.process_group import current_world
from disttrain.store import PrefixStore
from disttrain.testing import RankPool

SHAPES = [(7, 3), (5,), (0, 2), (2, 9, 4)]


def whole(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def lying(*, filled: bool, odd: bool) -> dict[str, Any]:
    """Tensors along one axis: cut along their first dims, or along their last and whole in turn."""
    mesh = init_device_mesh("cpu", (get_world_size(),))
    tensors = {}
    for number, shape in enumerate(SHAPES):
        placement = (Replicate() if number % 2 else Shard(len(shape) - 1)) if odd else Shard(0)
        values = whole(shape) if filled else torch.zeros(shape)
        tensors[f"w{number}"] = distribute_tensor(values, mesh, [placement], src_data_rank=None)
    return {"model": tensors}


def save_both(path: str) -> None:
    state = lying(filled=True, odd=False)
    save_dcp({**state, "step": 3}, f"{path}/dcp")
    save_safetensors(state["model"], f"{path}/hf", max_file_bytes=200)


def load_both(path: str) -> None:
    state = {**lying(filled=False, odd=True), "step": 0}
    load_dcp(state, f"{path}/dcp")
    assert state["step"] == 3
    model = lying(filled=False, odd=True)["model"]
    load_safetensors(model, f"{path}/hf")
    for found in (state["model"], model):
        assert [tensor.full_tensor().tolist() for tensor in found.values()] == [
            whole(shape).tolist() for shape in SHAPES
        ]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_what_some_ranks_wrote_others_read(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(3, save_both, {"path": str(tmp_path)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "hf"]
    for num_ranks in (2, 4):
        rank_pool.run(num_ranks, load_both, {"path": str(tmp_path)})
    state = {"model": {f"w{number}": torch.zeros(shape) for number, shape in enumerate(SHAPES)}, "step": 0}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert [tensor.tolist() for tensor in state["model"].values()] == [  # type: ignore[attr-defined]
        whole(shape).tolist() for shape in SHAPES
    ]


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))


def trained_by_torch() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model under torch's own FSDP2, on our transports, after a step."""
    from torch.distributed.device_mesh import init_device_mesh as torch_mesh
    from torch.distributed.fsdp import fully_shard

    world = current_world("test")
    store, rank, size = world.store.clone(), world.rank, world.world_size
    destroy_process_group()
    init_process_group(
        store=PrefixStore("registered", store), rank=rank, world_size=size, timeout=30, register_with_torch=True
    )
    made = model()
    fully_shard(made, mesh=torch_mesh("cpu", (size,)))
    optimizer = torch.optim.Adam(made.parameters(), lr=0.25)
    made(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    return made, optimizer


def save_by_torch(path: str) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    made, optimizer = trained_by_torch()
    state = {"model": get_model_state_dict(made), "optimizer": get_optimizer_state_dict(made, optimizer)}
    dcp.save(state, checkpoint_id=path)
    weight = made[0].weight  # type: ignore[index]
    return {"weight": weight.full_tensor().detach(), "exp_avg": optimizer.state[weight]["exp_avg"].full_tensor()}


def load_what_torch_saved(path: str) -> dict[str, Any]:
    made = model()
    fully_shard(made)
    optimizer = torch.optim.Adam(made.parameters())
    state = training_state(made, optimizer)
    report = load_dcp(state, path, rename=torch_optimizer_names, allow=["missing", "unexpected"])
    assert {name.rpartition("/")[2] for name in report.missing} == {"options"}
    assert {name.split("/")[1] for name in report.unexpected} == {"param_groups"}
    set_training_state(made, optimizer, state)
    weight = made[0].weight  # type: ignore[index]
    return {"weight": weight.full_tensor().detach(), "exp_avg": optimizer.state[weight]["exp_avg"].full_tensor()}


def save_for_torch(path: str) -> None:
    made = model()
    fully_shard(made)
    save_dcp({"model": made}, path)


def load_by_torch(path: str) -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    made, _ = trained_by_torch()
    dcp.load({"model": get_model_state_dict(made)}, checkpoint_id=path)
    assert [tensor.full_tensor().tolist() for tensor in made.parameters()] == [  # type: ignore[operator]
        tensor.tolist() for tensor in model().parameters()
    ]


def test_torchs_own_ranks_save_and_ours_load(rank_pool: RankPool, tmp_path: Path) -> None:
    saved, *_ = rank_pool.run(2, save_by_torch, {"path": str(tmp_path / "dcp")})
    loaded, *_ = rank_pool.run(3, load_what_torch_saved, {"path": str(tmp_path / "dcp")})
    assert torch.equal(loaded["weight"], saved["weight"])
    assert torch.equal(loaded["exp_avg"], saved["exp_avg"])
    assert saved["exp_avg"].abs().sum() > 0


def test_our_ranks_save_and_torchs_own_load(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(3, save_for_torch, {"path": str(tmp_path / "dcp")})
    rank_pool.run(2, load_by_torch, {"path": str(tmp_path / "dcp")})


def refuse_what_has_no_place(path: str) -> None:
    for call in (save_dcp, save_safetensors):
        with pytest.raises(CheckpointError, match="'own' is"):
            call({"w": torch.ones(2), "own": PerRank(get_rank())}, f"{path}/x")
    with pytest.raises(CheckpointError, match=r"has no \.metadata"):
        load_dcp({"w": torch.ones(2)}, path)


def test_every_rank_gets_the_one_error(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(3, refuse_what_has_no_place, {"path": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []


def convert_together(path: str) -> None:
    save({f"w{number}": torch.full((10,), float(number)) for number in range(6)}, f"{path}/ours")
    convert(f"{path}/ours", f"{path}/hf", "safetensors", max_file_bytes=50)
    convert(f"{path}/hf", f"{path}/back", "disttrain")


def test_ranks_convert_together(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(2, convert_together, {"path": str(tmp_path)})
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == 6
    assert {name: set(tensor.tolist()) for name, tensor in load_full(tmp_path / "back").items()} == {
        f"w{number}": {float(number)} for number in range(6)
    }


def load_some(path: str) -> None:
    """Ranks that lack different things are told of all of them."""
    state = {"w": torch.zeros(2), f"new{get_rank()}": torch.zeros(1), **({"old": 0} if get_rank() == 0 else {})}
    with pytest.raises(CheckpointError, match="the save lacks new0, new1; the state lacks more"):
        load(state, path)
    report = load(state, path, allow=["missing", "unexpected"])
    assert (report.missing, report.unexpected, report.mismatched) == (("new0", "new1"), ("more",), {})
    assert state["w"].tolist() == [1, 1]


def test_all_ranks_get_one_report(rank_pool: RankPool, tmp_path: Path) -> None:
    save({"w": torch.ones(2), "old": 1, "more": 2}, tmp_path / "save")
    rank_pool.run(2, load_some, {"path": str(tmp_path / "save")})


def save_by_url(path: str) -> None:
    """fsspec's own files stand for a place that all ranks see, with its rename and locks unused."""
    checkpointer = Checkpointer(f"file://{path}/runs", keep=1)
    for step in (1, 2):
        checkpointer.save(step, lying(filled=True, odd=False))
    state = lying(filled=False, odd=True)
    assert checkpointer.load(state) == 2
    assert state["model"]["w0"].full_tensor().tolist() == whole(SHAPES[0]).tolist()


def test_ranks_save_by_url(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(2, save_by_url, {"path": str(tmp_path)})
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["step-00000002"]
