"""Plain values must be alike on all ranks: what differs is named and refused, what each rank has its own of is kept."""

from __future__ import annotations

import math
import struct
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain import get_rank
from disttrain.checkpoint import (
    PerRank,
    RngState,
    Stateful,
    Value,
    get_state_dict,
    load,
    load_full,
    save,
)
from disttrain.checkpoint.plan import SPLIT_BYTES
from disttrain.checkpoint.saving.alike import described_values, differing_groups, refuse_differing, shared_names
from disttrain.checkpoint.saving.digests import weighed
from disttrain.errors import CheckpointError
from disttrain.process_group.calls.packing import pack
from disttrain.testing import run_threads

OTHER_NAN = struct.unpack("<d", struct.pack("<Q", 0xFFF8_0000_0000_0123))[0]
WEIGHT = torch.ones(2)


def refused(*states: dict[str, Any]) -> list[str]:
    """What each rank is told when it saves its state."""

    def body() -> str:
        with pytest.raises(CheckpointError) as raised:
            save({"w": WEIGHT, **states[get_rank()]}, "never")
        return f"{raised.value.problem} {raised.value.remedy}"

    return run_threads(len(states), body)


@pytest.mark.parametrize(
    ("states", "sentence"),
    [
        (
            [{"loader": {"at": 3}}, {"loader": {"at": 4}}, {"loader": {"at": 4}}],
            "values differ among ranks: 'loader/at' is 3 on rank 0, 4 on ranks 1, 2. Wrap what each rank",
        ),
        ([{"x": 0.5}, {"x": 0.25}], "'x' is 0.5 on rank 0, 0.25 on rank 1"),
        ([{"x": math.nan}, {"x": 1.5}], "'x' is nan on rank 0, 1.5 on rank 1"),
        ([{"x": Value({"k": (1, 2)})}, {"x": Value({"k": (1, 3)})}], "'x' is {'k': (1, 2)} on rank 0, {'k': (1, 3)}"),
        ([{"x": (1, 2)}, {"x": [1, 2]}], "'x' is (1, 2) on rank 0, [1, 2] on rank 1"),
        ([{"x": True}, {"x": None}], "'x' is True on rank 0, None on rank 1"),
        ([{"x": torch.float16}, {"x": torch.float32}], "'x' is torch.float16 on rank 0, torch.float32 on rank 1"),
        ([{"x": {1: 2}}, {"x": {1: 3}}], "'x' is {1: 2} on rank 0, {1: 3} on rank 1"),
        # Some have other things besides, as the stages of a pipeline have.
        ([{"x": 1}, {"y": 0}, {"x": 2}], "'x' is 1 on rank 0, 2 on rank 2."),
        ([{"x": 1, "own0": 1}, {"x": 2, "own1": torch.ones(1)}], "'x' is 1 on rank 0, 2 on rank 1."),
        ([{"x": np.zeros(3)}, {"x": np.ones(3)}], r"'x' is an array of <f8[3]... (digest "),
        ([{"x": [torch.zeros(3)]}, {"x": [torch.ones(3)]}], r"'x' is [a tensor of float32[3]...] (digest "),
        ([{"x": torch.tensor(3)}, {"x": torch.tensor(4)}], "'x' is 3 on rank 0, 4 on rank 1"),
        ([{"x": torch.tensor(0.5)}, {"x": torch.tensor(0.25)}], "'x' is 0.5 on rank 0, 0.25 on rank 1"),
        (
            [{"x": torch.zeros(5056).byte()}, {"x": torch.ones(5056).byte()}],
            r"'x' is a tensor of uint8[5056]... (digest ",
        ),
        ([{"x": torch.tensor(3)}, {"x": torch.tensor(4), "y": 0}], "'x' is 3 on rank 0, 4 on rank 1"),
        ([{"x": "a" * 99 + "b"}, {"x": "a" * 100}], "'x' is 'aaaaaaaaaaaaaaaaa...aaaaaaaaaaaaaaaaab' (digest "),
        ([{f"x{at}": rank for at in range(9)} for rank in range(2)], "'x3' is 0 on rank 0, 1 on rank 1; and 5 more."),
        ([{"o": {"param_groups": [{"lr": rank}]}} for rank in range(2)], "flatten_optimizer_state_dict=True"),
    ],
)
def test_all_ranks_are_told_who_has_what(states: list[dict[str, Any]], sentence: str) -> None:
    told = refused(*states)
    assert len(set(told)) == 1
    assert sentence in told[0]


@pytest.mark.parametrize(
    "states",
    [
        [{"x": math.nan, "y": [math.nan]}, {"x": OTHER_NAN, "y": [-math.nan]}],
        [{"x": {1: 2, 3: (4,)}}, {"x": {3: (4,), 1: 2}}],
        [{"x": 1, "y": 0.0}, {"x": 1.0, "y": -0.0}],
        [{"x": 1}, {}, {"x": 1, "y": 2}],
        [{"x": PerRank(1)}, {"x": PerRank(2)}],
        [{"x": PerRank(1)}, {}],
    ],
)
def test_values_that_are_alike_are_saved(tmp_path: Path, states: list[dict[str, Any]]) -> None:
    run_threads(len(states), lambda: save({"w": WEIGHT, **states[get_rank()]}, tmp_path / "save"))
    found = load_full(tmp_path / "save")["x"]
    assert str(found) == str(states[0]["x"])


ROWS = torch.eye(3)
LARGE = torch.arange(SPLIT_BYTES, dtype=torch.float32)


@pytest.mark.parametrize(
    ("world_size", "states", "named"),
    [
        # As the averages of batches that each rank has its own of.
        (2, [{"mean": ROWS[0], "var": ROWS[0]}, {"mean": ROWS[0] + 1, "var": ROWS[1]}], "'mean', 'var'. Averages"),
        (3, [{"x": ROWS[1]}, {"x": ROWS[1]}, {"x": ROWS[2]}], "'x'. "),
        (3, [{"y": ROWS[0]}, {"x": ROWS[1], "y": ROWS[0]}, {"x": ROWS[2]}], "'x'. "),
        (3, [{"x": ROWS[:2, 1]}, {"x": ROWS[:2, 1].clone()}, {"x": ROWS[:2, 2]}], "'x'. "),
        # Large ones are written by several ranks where they are alike.
        (3, [{"a": LARGE, "x": LARGE}, {"a": LARGE, "x": LARGE + 1}, {"a": LARGE, "x": LARGE + 2}], "'x'. "),
        (2, [{"x": torch.zeros(1 << 15).long()}, {"x": torch.ones(1 << 15).long()}], "'x'. "),
        (2, [{"x": ROWS * 1j}, {"x": (ROWS * 1j).conj()}], "'x'. "),
        (2, [{f"x{at}": ROWS[rank] for at in range(9)} for rank in range(2)], "'x5' and 3 more. "),
    ],
)
def test_tensors_that_differ_are_named_and_one_ranks_are_kept(
    tmp_path: Path, world_size: int, states: list[dict[str, Any]], named: str
) -> None:
    with pytest.warns(RuntimeWarning, match="Plain tensors in the state differ among ranks") as warned:
        run_threads(world_size, lambda: save({"w": WEIGHT, **states[get_rank()]}, tmp_path / "save"))
    assert len(warned) == 1
    assert f"keeps those of the first rank that has them: {'' if 'more' in named else named}" in str(warned[0].message)
    assert named in str(warned[0].message)
    found = load_full(tmp_path / "save")
    for name in found.keys() - {"w"}:
        assert torch.equal(found[name], next(state[name] for state in states if name in state)), name


def test_digests_of_gpus_tell_places() -> None:
    numbers = torch.arange(1 << 10).byte()
    digests = [
        int(weighed(one)) for one in (numbers, numbers.flip(0), numbers.roll(8), numbers[1:], numbers[1:].roll(1))
    ]
    assert len(set(digests)) == len(digests)
    assert digests[0] == int(weighed(numbers.clone()))


def test_alike_values_take_no_meeting_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from disttrain.checkpoint.saving.assembly import Assembly  # here, to count its meetings

    met: list[str] = []
    agree = Assembly.agree
    monkeypatch.setattr(Assembly, "agree", lambda self, *rest: (met.append(self.operation), agree(self, *rest))[1])
    run_threads(2, lambda: save({"w": WEIGHT, "step": 3}, tmp_path / "save"))
    assert met == ["save"] * 4  # two on each rank


class Loader:
    """A position that is each rank's own."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, 0: ["any", {1: "keys"}]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict[0] == ["any", {1: "keys"}]
        self.at = state_dict["at"]


@pytest.fixture
def of_torchdata(monkeypatch: pytest.MonkeyPatch) -> type[Loader]:
    """A class as torchdata has one, and one that inherits from it."""
    module = types.ModuleType("torchdata.stateful_dataloader")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    theirs = type("StatefulDataLoader", (Loader,), {"__module__": module.__name__})
    return type("Mine", (theirs,), {})


@pytest.mark.parametrize("way", ["by itself", "wrapped"])
def test_a_loader_is_taken_per_rank(tmp_path: Path, of_torchdata: type[Loader], way: str) -> None:
    def state_of(at: int) -> dict[str, Any]:
        loader = of_torchdata(at) if way == "by itself" else PerRank(Loader(at))
        return {"w": torch.ones(2), "loader": loader}

    def body() -> int:
        save(state_of(10 * get_rank() + 3), tmp_path / "save")
        state = state_of(-1)
        load(state, tmp_path / "save")
        loader = state["loader"]
        return int((loader.value if isinstance(loader, PerRank) else loader).at)

    assert run_threads(3, body) == [3, 13, 23]
    state = {"w": torch.zeros(2), "loader": of_torchdata(0)}
    load(state, tmp_path / "save")
    assert state["loader"].at == 3
    state["new"] = of_torchdata(7)
    load(state, tmp_path / "save", allow=["missing"])
    assert state["new"].at == 7


def test_another_loaders_position_is_refused_until_it_is_wrapped() -> None:
    class Plain(Loader):
        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at}

    def body() -> str:
        with pytest.raises(CheckpointError, match="'loader/at' is 0 on rank 0, 1 on rank 1") as raised:
            save({"w": WEIGHT, "loader": Plain(get_rank())}, "never")
        return raised.value.remedy

    assert (
        run_threads(2, body)
        == ["Wrap what each rank has its own of in PerRank (also an object with a state), or make it equal."] * 2
    )


def test_generators_are_each_ranks_own(tmp_path: Path) -> None:
    save({"w": WEIGHT, "rng": RngState()}, tmp_path / "alone")
    run_threads(2, lambda: save({"w": WEIGHT, "rng": RngState()}, tmp_path / "save"))


PLAIN = st.none() | st.booleans() | st.integers(-(1 << 63), 1 << 63) | st.floats() | st.text(max_size=3)
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=6,
)


def turned(value: Any) -> Any:
    """The same value, made otherwise."""
    if isinstance(value, dict):
        return {key: turned(value[key]) for key in reversed(list(value))}
    if isinstance(value, list | tuple):
        return type(value)(map(turned, value))
    return OTHER_NAN if value != value else value


@settings(max_examples=25)
@given(VALUES, VALUES)
def test_what_differs_is_found_and_nothing_else(one: Any, other: Any) -> None:
    same = [described_values({"x": pack(value)}) for value in (one, turned(one))]
    refuse_differing("save", same)
    if repr(other) != repr(one) and one != other and one != turned(other):
        with pytest.raises(CheckpointError, match="values differ among ranks: 'x' is"):
            refuse_differing("save", [described_values({"x": pack(value)}) for value in (one, other)])


def test_values_are_compared_among_the_ranks_that_have_them() -> None:
    alike = ["c", "d"]
    names = [["a", "b"], ["b", "c", "a"], alike]
    assert [shared_names(names, rank, list) for rank in range(3)] == [
        [(0, ["a", "b"])],
        [(0, ["a", "b"]), (1, ["c"])],
        [(1, ["c"])],
    ]
    assert [shared_names([*names, alike], rank, list) for rank in (0, 2, 3)] == [
        [(0, ["a", "b"])],
        [(1, ["c"]), (2, ["d"])],
        [(1, ["c"]), (2, ["d"])],
    ]
    assert differing_groups([[[0, b"1"]], [[0, b"1"], [1, b"2"]], [[1, b"3"]]]) == [1]


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({}, "that is saved, nothing."),
        ({"model": "model", "optim": "optim"}, "only plain values ('model', 'optim')"),
        ({"model": {"step": 1}, "rng": RngState()}, "only plain values ('model/step')"),
        ({"model": torch.nn.ReLU(), "loss": 1.5}, "only plain values ('loss')"),
        (dict(zip(["model", "optim"], {"weight": 1, "bias": 2}, strict=True)), "('model', 'optim')"),
    ],
)
def test_a_save_without_a_tensor_warns(tmp_path: Path, state: dict[str, Any], named: str) -> None:
    with pytest.warns(RuntimeWarning, match="There is no tensor in the state") as warned:
        run_threads(2, lambda: save(dict(state), tmp_path / "save"))
    assert len(warned) == 1
    assert named in str(warned[0].message)


@pytest.mark.parametrize(
    "state",
    [
        {"loader": PerRank({"at": 1})},
        {"loader": Loader(3)},
        {"rng": RngState()},
        {"steps": Value({"at": 1})},
        {"step": 1, "rows": [torch.ones(2)]},
        {"step": 1, "rows": np.ones(2)},
        {"step": 1, "w": torch.ones(0)},
    ],
)
def test_what_is_meant_does_not_warn(tmp_path: Path, state: dict[str, Any]) -> None:
    assert isinstance(Loader(3), Stateful)
    state = {key: PerRank(value) if isinstance(value, Loader) else value for key, value in state.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(state, tmp_path / "save")


def test_one_rank_with_a_tensor_is_enough(tmp_path: Path) -> None:
    run_threads(2, lambda: save({"step": 1, **({"w": WEIGHT} if get_rank() else {})}, tmp_path / "save"))


def test_torchs_line_gives_tensors(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    model_state, optimizer_state = get_state_dict(model, torch.optim.AdamW(model.parameters()))
    save({"model": model_state, "optim": optimizer_state}, tmp_path / "save")
    assert torch.equal(load_full(tmp_path / "save")["model"]["weight"], model.weight)
