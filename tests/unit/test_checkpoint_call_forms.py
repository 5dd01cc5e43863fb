"""torch.distributed.checkpoint's call forms: what they say is done, the rest is refused by name."""

from __future__ import annotations

from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from disttrain import barrier, get_rank, get_world_size, new_group
from disttrain.checkpoint import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    BroadcastingTorchSaveReader,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    DefaultStager,
    DynamicMetaLoadPlanner,
    FileSystemReader,
    FileSystemWriter,
    FsspecReader,
    FsspecWriter,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    PerRank,
    StagingOptions,
    Value,
    async_save,
    dcp_to_torch_save,
    load,
    save,
    torch_save_to_dcp,
)
from disttrain.errors import CheckpointError
from disttrain.process_group import current_world
from disttrain.testing import run_threads


def ones() -> dict[str, Any]:
    return {"w": torch.ones(2)}


def loaded(**arguments: Any) -> list[float]:
    state = {"w": torch.zeros(2)}
    load(state, **arguments)
    return state["w"].tolist()


def test_a_checkpoint_id_is_a_path(tmp_path: Path) -> None:
    save(ones(), checkpoint_id=tmp_path / "save", process_group=None, no_dist=True, use_collectives=True)
    assert loaded(checkpoint_id=str(tmp_path / "save"), storage_reader=None, planner=None) == [1, 1]


@pytest.mark.parametrize(
    ("call", "arguments", "said"),
    [
        (save, {}, "save: neither of path and checkpoint_id"),
        (load, {"path": "x", "checkpoint_id": "x"}, "load: both of path and checkpoint_id"),
        (save, {"path": "x", "storage_writer": FileSystemWriter("y")}, "save: both of path and checkpoint_id"),
        (save, {"storage_writer": 1}, r"storage_writer= is a int.*Give a FileSystemWriter"),
        (load, {"storage_reader": 1}, r"storage_reader= is a int.*Give a FileSystemReader"),
        (save, {"path": "x", "planner": 1}, r"planner= is a int.*DefaultSavePlanner"),
        (load, {"path": "x", "planner": 1}, r"planner= is a int.*allow=, rename= and convert="),
        (async_save, {"storage_writer": HuggingFaceStorageWriter("x")}, "async_save: .*Use `save`"),
    ],
)
def test_what_cannot_be_is_refused(call: Any, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        call(ones(), **arguments)


class _OwnPlanner(DefaultLoadPlanner):
    pass


def test_a_planner_that_is_derived_would_not_be_asked(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a _OwnPlanner, which is not asked"):
        load({}, tmp_path, planner=_OwnPlanner())
    with pytest.raises(CheckpointError, match="flatten_state_dict=False"):
        DefaultSavePlanner(flatten_state_dict=False)


@pytest.mark.parametrize("theirs", [False, True])
def test_writers_and_readers_say_where(tmp_path: Path, theirs: bool) -> None:
    writer, reader = (dcp.FileSystemWriter, dcp.FileSystemReader) if theirs else (FileSystemWriter, FileSystemReader)
    save(ones(), storage_writer=writer(str(tmp_path / "a"), thread_count=4))
    assert loaded(storage_reader=reader(str(tmp_path / "a"))) == [1, 1]
    save(ones(), checkpoint_id=tmp_path / "b", storage_writer=writer(str(tmp_path / "not there")))
    assert loaded(checkpoint_id=tmp_path / "b", storage_reader=reader(str(tmp_path / "not there"))) == [1, 1]
    save(ones(), checkpoint_id=tmp_path / "b", storage_writer=writer(str(tmp_path)))  # takes its place
    with pytest.raises(CheckpointError, match="is there already"):
        save(ones(), storage_writer=writer(str(tmp_path / "b"), overwrite=False))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_writers_and_readers_of_urls(tmp_path: Path) -> None:
    url = f"local://{tmp_path}/save"
    save(ones(), storage_writer=FsspecWriter(url, auto_mkdir=True))
    assert loaded(storage_reader=FsspecReader(url, auto_mkdir=True)) == [1, 1]
    save(ones(), storage_writer=FileSystemWriter("memory://forms/save"))
    save({"w": torch.full((2,), 3.0)}, storage_writer=FsspecWriter("memory://forms/save"))
    assert loaded(storage_reader=FileSystemReader("memory://forms/save")) == [3, 3]
    fsspec.filesystem("memory").rm("/forms", recursive=True)


@pytest.mark.parametrize("theirs", [False, True])
def test_a_load_in_torchs_form_takes_what_the_state_has(tmp_path: Path, theirs: bool) -> None:
    save({"w": torch.ones(2), "more": torch.ones(3), "step": 4}, checkpoint_id=tmp_path / "save")
    state: dict[str, Any] = {"w": torch.zeros(2, dtype=torch.float64)}
    load(state, checkpoint_id=tmp_path / "save")
    assert state["w"].tolist() == [1, 1]
    with pytest.raises(CheckpointError, match="the state lacks more, step"):
        load({"w": torch.zeros(2)}, tmp_path / "save")
    state = {"w": torch.zeros(2), "other": torch.full((1,), 7.0)}
    with pytest.raises(CheckpointError, match="the save lacks other"):
        load(state, checkpoint_id=tmp_path / "save")
    planner = (dcp.DefaultLoadPlanner if theirs else DefaultLoadPlanner)(allow_partial_load=True)
    report = load(state, checkpoint_id=tmp_path / "save", planner=planner)
    assert (report.missing, state["w"].tolist(), state["other"].tolist()) == (("other",), [1, 1], [7])


def test_a_program_that_looks_for_torchs_metadata_sees_a_save(tmp_path: Path) -> None:
    save(ones(), checkpoint_id=tmp_path / "torchs")
    save(ones(), tmp_path / "ours")
    found = [(tmp_path / name / ".metadata").is_file() for name in ("torchs", "ours")]
    assert found == [True, False]
    assert b"manifest.json says what it has" in (tmp_path / "torchs" / ".metadata").read_bytes()


def test_load_reads_torchs_own_folder(tmp_path: Path) -> None:
    values = torch.arange(6.0).reshape(2, 3)
    saved = {"model": {"a.b": values}, "optim": {"param_groups": [{"lr": 0.5, "params": ["a.b"]}]}, "step": 3}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(saved, checkpoint_id=tmp_path / "theirs")
    state: dict[str, Any] = {"model": {"a.b": torch.zeros(2, 3)}, "optim": {"param_groups": [{}]}, "step": 0}
    load(state, checkpoint_id=tmp_path / "theirs")
    assert state["model"]["a.b"].equal(values)
    assert (state["optim"]["param_groups"], state["step"]) == (saved["optim"]["param_groups"], 3)  # type: ignore[index]
    save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "theirs")  # over torch's own, as torch does
    assert loaded(path=tmp_path / "theirs") == [1, 1]


def test_hugging_face_files(tmp_path: Path) -> None:
    state = {"a.weight": torch.arange(4.0), "b.weight": torch.ones(2, 3, dtype=torch.bfloat16)}
    for _ in range(2):  # the second takes the place of the first
        save(state, storage_writer=HuggingFaceStorageWriter(str(tmp_path / "one"), save_distributed=True))
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
    ]
    numbers = {"a.weight": 2, "b.weight": 1}
    save(state, storage_writer=HuggingFaceStorageWriter(str(tmp_path / "two"), fqn_to_index_mapping=numbers))
    for reader in (HuggingFaceStorageReader, dcp.HuggingFaceStorageReader):
        for name in ("one", "two"):
            read = {"a.weight": torch.zeros(4), "b.weight": torch.zeros(2, 3)}
            load(read, storage_reader=reader(str(tmp_path / name)))
            assert read["a.weight"].equal(state["a.weight"])
            assert read["b.weight"].eq(1).all()
    with pytest.raises(CheckpointError, match=r"fqn_to_index_mapping has no 'b.weight'"):
        save(state, storage_writer=HuggingFaceStorageWriter(str(tmp_path / "x"), {"a.weight": 1}))


def test_the_default_group_is_every_rank_and_no_dist_is_one(tmp_path: Path) -> None:
    def on_each_rank() -> None:
        state = {"w": torch.ones(2), f"own{get_rank()}": torch.ones(1)}
        save(state, checkpoint_id=tmp_path / "both", process_group=current_world("test").default_group)
        save({"rank": Value(get_rank())}, checkpoint_id=tmp_path / f"alone{get_rank()}", no_dist=True)
        barrier()  # alone, nobody waits for the other's save
        own = {"rank": -1}
        load(own, tmp_path / f"alone{1 - get_rank()}", no_dist=True)
        assert (own["rank"], get_world_size()) == (1 - get_rank(), 2)

    run_threads(2, on_each_rank)
    state = {"w": torch.zeros(2), "own0": torch.zeros(1), "own1": torch.zeros(1)}
    load(state, tmp_path / "both")
    assert [tensor.tolist() for tensor in state.values()] == [[1, 1], [1], [1]]


def test_a_group_saves_and_loads_while_others_do_not(tmp_path: Path) -> None:
    def on_each_rank() -> None:
        group = new_group([2, 1], sort_ranks=False)
        if get_rank() == 0:
            with pytest.raises(CheckpointError, match=r"process_group= is a NonGroupMember"):
                save({"w": torch.ones(2)}, tmp_path / "part", process_group=group)
            return
        save({f"own{get_rank()}": torch.full((1,), float(get_rank()))}, tmp_path / "part", process_group=group)
        state = {"own1": torch.zeros(1), "own2": torch.zeros(1)}
        load(state, tmp_path / "part", process_group=group)
        assert [tensor.item() for tensor in state.values()] == [1, 2]
        with pytest.raises(CheckpointError, match=r"on rank 1: .*no dict|ranks \[2\] failed|not a dict"):
            save([] if get_rank() == 1 else state, tmp_path / "bad", process_group=group)  # type: ignore[arg-type]

    run_threads(3, on_each_rank)


def test_asynchronous_saves_in_torchs_form(tmp_path: Path) -> None:
    response = async_save(
        ones(),
        checkpoint_id=tmp_path / "a",
        async_stager=DefaultStager(StagingOptions(True, True, True, True)),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        planner=DefaultSavePlanner(enable_plan_caching=True),
    )
    assert isinstance(response, AsyncSaveResponse)
    response.staging_completion.result(60)
    assert response.upload_completion.result(60) == tmp_path / "a"
    future = async_save({"w": torch.full((2,), 2.0)}, storage_writer=FileSystemWriter(tmp_path / "a"), no_dist=True)
    assert isinstance(future, Future)
    assert future.cancel() is False
    assert wait([future], 60).done == {future}
    assert future.result(timeout=1) == tmp_path / "a"
    assert loaded(path=tmp_path / "a") == [2, 2]
    assert (tmp_path / "a" / ".metadata").is_file()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch's own, where there is no job
def test_files_of_torch_save_become_saves_and_back(tmp_path: Path) -> None:
    model = {"a.weight": torch.arange(6.0).view(2, 3), "b": torch.ones(0)}
    save({"model": model, "step": 3, "own": PerRank([1])}, checkpoint_id=tmp_path / "save")
    dcp.save({"model": model, "step": 3}, checkpoint_id=tmp_path / "of_torch", no_dist=True)
    of_folders: dict[str, dict[str, Any]] = {"save": {"own": [1]}, "of_torch": {}}
    for folder, own in of_folders.items():
        dcp_to_torch_save(tmp_path / folder, tmp_path / f"{folder}.pt")
        read = torch.load(tmp_path / f"{folder}.pt", weights_only=True)
        assert {name: value for name, value in read.items() if name != "model"} == {"step": 3, **own}
        metadata = FileSystemReader(tmp_path / folder).read_metadata()
        assert (saved := metadata.state_dict_metadata)["model.a.weight"].size == (2, 3)
        assert saved["model.a.weight"].properties.dtype == torch.float32
        assert sorted(saved) == sorted(["model.a.weight", "model.b", "step", *own])
        assert metadata.planner_data["model.a.weight"] == ("model", "a.weight")
        assert {name: value.tolist() for name, value in read["model"].items()} == {
            name: value.tolist() for name, value in model.items()
        }
    torch_save_to_dcp(str(tmp_path / "save.pt"), str(tmp_path / "back"))
    for form in (
        {"checkpoint_id": tmp_path / "back"},
        {"storage_reader": BroadcastingTorchSaveReader(), "checkpoint_id": tmp_path / "save.pt"},
        {"storage_reader": BroadcastingTorchSaveReader(tmp_path / "save.pt"), "planner": DynamicMetaLoadPlanner()},
    ):
        into: dict[str, Any] = {"model": {"a.weight": torch.zeros(2, 3)}, "step": 0}
        load(into, **form)
        assert (into["step"], into["model"]["a.weight"].tolist()) == (3, [[0, 1, 2], [3, 4, 5]])
    torch.save({"class": Path()}, tmp_path / "more.pt")
    with pytest.raises(CheckpointError, match=r"more\.pt"):
        torch_save_to_dcp(tmp_path / "more.pt", tmp_path / "no")
    assert not (tmp_path / "no").exists()
