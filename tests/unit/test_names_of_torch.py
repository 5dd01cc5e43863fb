"""What programs written for torch.distributed ask for by its names."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import disttrain
from disttrain import checkpoint, dtensor, fsdp2, pipelining, tp
from disttrain.dtensor import Replicate, Shard, distribute_tensor
from disttrain.errors import CollectiveTimeoutError, MeshError, ScheduleError
from disttrain.pipelining import Schedule1F1B, ScheduleInterleaved1F1B, get_schedule_class, make_schedule, to_csv
from disttrain.process_group import World
from disttrain.process_group.backends.fabric import Fabric
from disttrain.store.protocol.wire import Answer, Op
from disttrain.testing import run_threads


def test_errors_are_caught_by_torchs_names() -> None:
    store = disttrain.HashStore()
    with pytest.raises(disttrain.QueueEmptyError):
        store.queue_pop("jobs", block=False)
    with pytest.raises(disttrain.DistStoreError):
        store.wait(["nobody"], 0)
    with pytest.raises(disttrain.DistNetworkError):
        disttrain.TCPStore("127.0.0.1", 1, is_master=False, timeout=0.01)
    with pytest.raises(ValueError, match="not a rank"):
        disttrain.get_rank()
    with pytest.raises(RuntimeError):
        disttrain.get_world_size()
    assert issubclass(CollectiveTimeoutError, disttrain.DistBackendError)


def test_timeouts_of_stores_are_torchs() -> None:
    store = disttrain.PrefixStore("here", disttrain.HashStore(timeout=3))
    assert store.timeout == timedelta(seconds=3)
    store.set_timeout(timedelta(seconds=0))
    with pytest.raises(disttrain.DistStoreError):
        store.get("nothing")
    store.set("something", "1")
    assert store.get("something") == b"1"


@pytest.mark.parametrize(
    ("package", "name", "says"),
    [
        (disttrain, "shrink_group", r"which torch has: A group of the ranks that are left .* See docs/differences\.md"),
        (dtensor, "context_parallel", "It is in disttrain.context_parallel"),
        (fsdp2, "FullyShardedDataParallel", "FSDP2 replaces"),
        (tp, "input_reshard", "torch.utils.checkpoint"),
        (pipelining, "build_stage", "SplitModel.build_stage"),
        (checkpoint, "no_such_thing", "has no attribute 'no_such_thing'$"),
    ],
    ids=lambda value: getattr(value, "__name__", "") or value[:12],
)
def test_a_name_that_is_not_here_says_why(package: object, name: str, says: str) -> None:
    with pytest.raises(AttributeError, match=says):
        getattr(package, name)


def test_parts_are_found_without_an_import_of_their_own() -> None:
    assert disttrain.dtensor is dtensor
    assert disttrain.store.HashStore is disttrain.HashStore
    assert disttrain.process_group.functional.all_to_all_single_autograd
    assert dtensor.DeviceMesh is disttrain.DeviceMesh


def test_what_is_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert disttrain.is_gloo_available()
    assert disttrain.is_backend_available("GLOO")
    assert not disttrain.is_mpi_available()
    assert not disttrain.is_ucc_available()
    assert not disttrain.is_xccl_available()
    assert disttrain.Backend.MPI == torch.distributed.Backend.MPI
    assert disttrain.Backend.UCC == torch.distributed.Backend.UCC
    assert disttrain.Backend.XCCL == torch.distributed.Backend.XCCL
    assert disttrain.Backend.UNDEFINED == torch.distributed.Backend.UNDEFINED
    assert disttrain.is_nccl_available() == torch.cuda.is_available()
    assert disttrain.get_default_backend_for_device("cpu") == disttrain.Backend.default_device_backend_map["cpu"]
    assert disttrain.get_default_backend_for_device(torch.device("cuda", 1)) == disttrain.Backend.NCCL
    with pytest.raises(disttrain.DistBackendError, match="no transport serves 'meta'"):
        disttrain.get_default_backend_for_device("meta")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not disttrain.is_torchelastic_launched()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    assert disttrain.is_torchelastic_launched()
    monkeypatch.setenv("DISTTRAIN_DEBUG", "detail")
    assert disttrain.get_debug_level() == disttrain.DebugLevel.DETAIL


def _coalesced() -> None:
    rank, size = disttrain.get_rank(), disttrain.get_world_size()
    first, second = torch.full((2,), float(rank)), torch.full((), rank, dtype=torch.int64)
    assert disttrain.all_reduce_coalesced([first, second], op=disttrain.reduce_op.SUM) is None
    assert (first.tolist(), int(second)) == ([3.0, 3.0], 3)
    lists = [[torch.empty(1), torch.empty(2)] for _ in range(size)]
    handle = disttrain.all_gather_coalesced(lists, [torch.ones(1) * rank, torch.ones(2) * -rank], async_op=True)
    assert handle is not None
    handle.wait()
    assert [[one.tolist(), two.tolist()] for one, two in lists] == [[[r], [-r, -r]] for r in (0.0, 1.0, 2.0)]
    for call in (
        lambda: disttrain.all_reduce_coalesced([]),
        lambda: disttrain.all_gather_coalesced([], [torch.ones(1)]),
    ):
        with pytest.raises(ValueError, match=r"there is no tensor|for 3 ranks with 1 each"):
            call()


def test_several_tensors_at_once() -> None:
    run_threads(3, _coalesced)


def _timeouts() -> None:
    assert (disttrain.get_backend(), disttrain.get_backend_config()) == ("threads", "cpu:threads,cuda:threads")
    assert disttrain.get_pg_count() == 1
    disttrain.barrier(device_ids=[0], timeout=timedelta(seconds=5))
    disttrain._set_pg_timeout(timedelta(milliseconds=20))
    assert disttrain._get_default_group().timeout_s == 0.02


def _configurations() -> None:
    half = disttrain.new_group([0])
    config = disttrain._get_pg_config()
    assert config == {**config, "backend_config": disttrain.get_backend_config(), "pg_size": 2, "ranks": [0, 1]}
    assert config["pg_name"] == disttrain._get_process_group_name(disttrain.group.WORLD)
    assert len(disttrain._get_all_pg_configs()) == disttrain.get_pg_count()
    assert disttrain._get_group_size(None) == 2
    assert disttrain._get_pg_default_device().type == disttrain._get_object_coll_device() == "cpu"
    if disttrain.get_rank() == 0:
        assert disttrain._get_pg_config(half)["ranks"] == [0]


def test_what_torch_says_of_groups_in_private() -> None:
    run_threads(2, _configurations)


def test_a_barrier_takes_a_timeout_and_a_group_another_one() -> None:
    run_threads(2, _timeouts)


def _fake(size: int) -> World:
    return World(disttrain.HashStore(), 0, size, backend="fake", timeout_s=1.0)


def test_meshes_are_cut_and_joined() -> None:
    with disttrain.process_group.entered_world(_fake(8)):
        whole = disttrain.init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
        dense = whole._unflatten(0, (2, 2, 2), ("pp", "dp", "tp"))
        sparse = whole._unflatten("world", (2, 4), ("outer", "ep"), backend_override={"outer": "fake"})
        assert dense.mesh.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
        assert dense._layout.axis_names == ("pp", "dp", "tp")
        assert dense["dp"]._sym_get_coordinate(0) == 0
        assert sparse["ep"].mesh.tolist() == [0, 1, 2, 3]
        assert sparse.get_group("outer") is not dense.get_group("pp")
        joined = disttrain.DeviceMesh._concatenate([sparse["outer"], dense["tp"]])
        assert joined.mesh.tolist() == [[0, 1], [4, 5]]
        assert joined.mesh_dim_names == ("outer", "tp")
        with pytest.raises(MeshError, match="no axes of one mesh"):
            disttrain.DeviceMesh._concatenate([sparse["ep"], dense["tp"]])
        with pytest.raises(MeshError, match="don't multiply to axis 0"):
            whole._unflatten(0, (3, 2), ("a", "b"))


def test_shards_join_meshes_that_were_cut_of_one() -> None:
    with disttrain.process_group.entered_world(_fake(4)):
        whole = disttrain.init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
        for_tp = whole._unflatten(0, (2, 2), ("pp", "tp"))["tp"]
        for_dp = whole._unflatten(0, (2, 2), ("dp", "other"))["dp"]
        layer = nn.Linear(4, 4, bias=False)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), for_tp, [Shard(1)]))
        fsdp2.fully_shard(layer, mesh=for_dp)
        assert layer.weight.device_mesh.mesh.tolist() == [[0, 1], [2, 3]]
        assert layer.weight.placements == (Shard(0), Shard(1))


def _redistributed() -> None:
    mesh = disttrain.init_device_mesh("cpu", (2,))
    whole = torch.arange(4.0)
    again = distribute_tensor(whole, mesh, [Shard(0)]).redistribute(placements=[Replicate()], async_op=True)
    assert torch.equal(again.to_local(), whole)


def test_redistribution_takes_async_op() -> None:
    run_threads(2, _redistributed)


def test_schedules_know_how_many_stages_a_rank_has() -> None:
    assert issubclass(Schedule1F1B, pipelining.PipelineScheduleSingle)
    assert issubclass(ScheduleInterleaved1F1B, pipelining.PipelineScheduleMulti)
    assert get_schedule_class("Interleaved1F1B") is ScheduleInterleaved1F1B
    assert pipelining._PipelineSchedule is pipelining.PipelineSchedule


def _from_csv(path: Path) -> list[float]:
    rank = disttrain.get_rank()
    torch.manual_seed(rank)
    stage = pipelining.PipelineStage(nn.Linear(2, 2), rank, 2, torch.device("cpu"))
    schedule = pipelining._PipelineScheduleRuntime([stage], 4, loss_fn=lambda output, target: (output - target).sum())
    schedule._load_csv(str(path))
    losses: list[torch.Tensor] = []
    schedule.step(*((torch.ones(4, 2),) if rank == 0 else ()), target=torch.zeros(4, 2), losses=losses)
    assert stage.submod.weight.grad is not None
    with pytest.raises(ScheduleError, match="has 4 microbatches, n_microbatches is 2"):
        pipelining._PipelineScheduleRuntime([stage], 2)._load_csv(str(path))
    return [float(loss) for loss in losses]


def test_a_schedule_comes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text(to_csv(make_schedule("1F1B", 2, 4)), encoding="utf-8")
    first, last = run_threads(2, _from_csv, path)
    assert (len(first), len(last)) == (0, 4)


def test_a_part_of_a_job_is_no_job() -> None:
    with pytest.raises(disttrain.DistError, match="is a part of a job"):
        disttrain.init_process_group(
            rank=0, world_size=1, store=disttrain.HashStore(), _ranks=[3], register_with_torch=False
        )
    assert not disttrain.is_initialized()


def test_waiting_in_threads_is_bounded_anew() -> None:
    world = World(disttrain.HashStore(), 0, 2, backend="threads", timeout_s=9.0, options=Fabric(2))
    with disttrain.process_group.entered_world(world):
        group = disttrain.group.WORLD
        assert group is not None
        group.backend("barrier", "cpu")
        group.set_timeout(0.01)
        with pytest.raises(CollectiveTimeoutError, match=r"0\.01 s"):
            disttrain.all_reduce(torch.ones(1))


def test_groups_have_torchs_methods() -> None:
    def multiplied() -> None:
        group = disttrain.group.WORLD
        assert group is not None
        tensor = torch.ones(2)
        group.allreduce([tensor]).wait()
        assert tensor.tolist() == [2.0, 2.0]
        group.barrier().wait()
        with pytest.raises(AttributeError, match="has no attribute 'no_such_method'"):
            group.no_such_method()
        with pytest.raises(disttrain.DistError, match=r"the group is a builtins\.str, and none of this job's"):
            disttrain.barrier(group="world")  # type: ignore[arg-type]
        disttrain.destroy_process_group(disttrain.process_group.NON_GROUP_MEMBER)

    run_threads(2, multiplied)


def test_a_transport_is_named_by_its_class() -> None:
    assert disttrain.Backend("GLOO") == "gloo"
    for name in (None, 3, ["gloo"]):
        with pytest.raises(ValueError, match="is no name of a transport"):
            disttrain.Backend(name)


def _absent() -> None:
    rank = disttrain.get_rank()
    if rank == 2:
        return
    says = (
        r"Rank 0 timed out in monitoredBarrier after 500 ms: Rank 2 failed to pass monitoredBarrier in 500 ms"
        if rank == 0
        else r"Rank 1 successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
    )
    with pytest.raises(RuntimeError, match=says):
        disttrain.monitored_barrier(timeout=0.5, wait_all_ranks=True)


def test_a_monitored_barrier_has_torchs_words() -> None:
    run_threads(3, _absent)


def test_what_complex_numbers_cannot_has_torchs_words() -> None:
    def refused() -> None:
        with pytest.raises(ValueError, match="all_reduce does not support"):
            disttrain.all_reduce(torch.ones(1, dtype=torch.complex64), disttrain.ReduceOp.MAX)

    run_threads(2, refused)


class _Asked(disttrain.HashStore):
    """Counts what it is asked for."""

    num_requests = 0

    def _request(self, op: Op, arguments: tuple[Any, ...], wait_s: float) -> Answer:
        self.num_requests += 1
        return super()._request(op, arguments, wait_s)


def test_torch_is_told_without_asking_anybody() -> None:
    counts = {}
    for tells in (True, False, None):
        store, before = _Asked(), set(sys.modules)
        disttrain.init_process_group("gloo", store=store, rank=0, world_size=1, register_with_torch=tells)
        try:
            loaded = {name for name in set(sys.modules) - before if name.startswith("torch.")}
            assert torch.distributed.is_initialized() == (tells is not False)
            counts[tells] = store.num_requests, sorted(loaded)
        finally:
            disttrain.destroy_process_group()
        assert not torch.distributed.is_initialized()
    # The default group's transports are the same ones: no rank connects to another for it.
    assert counts[None] == counts[False]
    assert counts[True][1] == counts[None][1] == []
