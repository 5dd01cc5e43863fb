"""Values that travel without pickle."""

from __future__ import annotations

import datetime as dt
import enum
import sys
import uuid
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PureWindowsPath
from types import SimpleNamespace
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from disttrain import all_gather_object
from disttrain.dtensor import Shard, distribute_tensor
from disttrain.errors import ShapeError
from disttrain.mesh import init_device_mesh
from disttrain.process_group.calls.packing import pack, unpack
from disttrain.testing import run_threads

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(0, 99), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(plain)
def test_plain_values_come_back_equal(value: object) -> None:
    assert unpack(pack(value)) == value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int16, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(dtype)
    back = unpack(pack({"x": (tensor, dtype)}))["x"]
    assert torch.equal(back[0], tensor)
    assert (back[0].dtype, back[0].shape, back[1]) == (dtype, tensor.shape, dtype)


def test_views_of_complex_numbers() -> None:
    for num_elements in (1, 3):
        numbers = torch.arange(1.0, 1 + 2 * num_elements).view(-1, 2)
        numbers = torch.view_as_complex(numbers)
        for view in (numbers.imag, numbers.conj(), numbers.conj().imag):
            found = unpack(pack(view))
            assert found.tolist() == view.tolist()


def test_a_transposed_tensor_and_an_array() -> None:
    tensor = torch.arange(6).view(2, 3).T
    array = np.arange(6, dtype=np.int16).reshape(3, 2)
    back = unpack(pack([tensor, array]))
    assert torch.equal(back[0], tensor)
    assert np.array_equal(back[1], array)
    assert back[1].dtype == array.dtype


@pytest.mark.parametrize(
    "value",
    [
        {1, 2, "x", (3, None)},
        frozenset(("a", "b")),
        3 - 4j,
        OrderedDict([("b", 1), ("a", {2})]),
        Counter("abca"),
        defaultdict(list, {"x": [1]}),
        defaultdict(None, {1: 2}),
        range(1, 9, 2),
        slice(None, 3),
        dt.datetime(2020, 1, 2, 3, 4, 5, 6, dt.UTC),
        dt.date(2020, 1, 2),
        dt.timedelta(days=-1, microseconds=7),
        Path("a/b"),
        Decimal("1.10"),
        Fraction(1, 3),
        uuid.UUID(int=5),
        torch.Size([2, 3]),
        torch.device("cuda", 1),
        np.float64(1.5),
        np.float32(0.1),
        np.int64(-3),
        np.bool_(True),
        np.str_("text"),
        2**70,
        -(2**63) - 1,
        deque([1, {2}], maxlen=3),
        Namespace(lr=0.1, names=["a"]),
        SimpleNamespace(a=(1, 2)),
        dt.UTC,
        dt.timezone(dt.timedelta(hours=2), "here"),
        dt.datetime(2020, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
        PureWindowsPath("a/b"),
        np.dtype("float32"),
        torch.strided,
        torch.channels_last,
    ],
    ids=repr,
)
def test_plain_classes_come_back_as_they_were(value: Any) -> None:
    (found,) = unpack(pack([value]))
    assert type(found) is type(value)
    assert found == value
    if isinstance(value, dt.datetime):
        assert (found.tzinfo, found.fold) == (value.tzinfo, value.fold)
    if isinstance(value, deque):
        assert found.maxlen == value.maxlen
    if isinstance(value, dict):
        assert list(found.items()) == list(value.items())
        assert getattr(found, "default_factory", None) is getattr(value, "default_factory", None)


def test_sets_are_alike_on_ranks_that_hash_texts_otherwise() -> None:
    texts = [f"name{number}" for number in range(99)]
    assert pack({*texts}) == pack({*texts[::-1]})


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {object()},
        np.array([object()]),
        np.zeros(2, [("x", "i4")]),
        defaultdict(object),
        np.ma.array([1, 2], mask=[0, 1]),
    ],
)
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(ShapeError, match="cannot travel"):
        pack(value)


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Mode(enum.StrEnum):
    TRAIN = "train"


class Access(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


class Point(NamedTuple):
    x: float
    color: Color


@dataclass
class Config:
    lr: float
    points: list[Point] = field(default_factory=list)
    num_made: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.num_made = -1


@dataclass(frozen=True, slots=True)
class Frozen:
    mode: Mode
    inner: Config | None = None

    @dataclass
    class Inner:
        size: int


@pytest.mark.parametrize(
    "value",
    [
        Color.RED,
        Level.LOW,
        Mode.TRAIN,
        Access.READ | Access.WRITE,
        Point(1.5, Color.RED),
        Frozen(Mode.TRAIN, Config(0.5, [Point(0.0, Color.RED)])),
        Frozen.Inner(3),
        {Color.RED: {Level.LOW}, Point(1.0, Color.RED): (Access.READ,)},
    ],
    ids=repr,
)
def test_objects_that_are_data_come_back_as_what_they_were(value: Any) -> None:
    found = unpack(pack([value], with_classes=True), with_classes=True)[0]
    assert type(found) is type(value)
    assert found == value


def test_no_code_of_a_class_runs_when_its_object_comes() -> None:
    config = Config(0.5)
    config.num_made = 7
    found = unpack(pack(config, with_classes=True), with_classes=True)
    assert (found.num_made, found) == (7, config)


def test_files_name_no_classes() -> None:
    for value in (Color.RED, Config(0.5)):
        with pytest.raises(ShapeError, match="is neither plain, a tensor nor an array"):
            pack(value)
        with pytest.raises(ShapeError, match="extension type 7 is unknown"):
            unpack(pack(value, with_classes=True))


@dataclass
class Closing:
    path: str

    def __del__(self) -> None: ...


@dataclass
class Mapping(dict[str, int]):
    size: int


def local_class() -> object:
    @dataclass
    class Local:
        size: int

    return Local(1)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (local_class(), r"Local is not found by its name: it is defined in a function.*top of a module\."),
        (Closing("x"), r"Closing does something at its end \(__del__\)\. Send dataclasses\.asdict\(value\)"),
        (Mapping(3), r"Mapping is no plain dataclass\. Send"),
        (Access(0), r"<Access: 0> is no member of its class with a name\. Send its value\."),
        (torch.nn.Linear(1, 1), r"Linear is neither plain, .*\. Send its state_dict\(\), and load that there\."),
        (ValueError("x"), r"ValueError is neither plain.*\. Send its text: str\(error\)"),
        (lambda: None, r"function is neither plain.*\. Send its name, and have the function or class on each rank\."),
        (Config, r"type is neither plain.*\. Send its name"),
        (torch.Generator(), r"Generator is neither plain.*\. Send its get_state\(\)"),
        (Path, r"Send its name"),
        (
            type("Text", (str,), {})("x"),
            r"Text is neither plain.*\. Send it as what it is derived from: str\(value\)\.",
        ),
        (type("Own", (), {})(), r"Own is neither plain.*\. Send its attributes, vars\(value\)"),
        (np.zeros(2, [("x", "i4")]), r"ndarray is neither.*\. Send an array of numbers or texts: one for each field"),
        ([1, [object()]], r"object is neither plain.*\. Send plain values"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_what_cannot_travel_says_what_to_send_instead(value: object, sentence: str) -> None:
    with pytest.raises(ShapeError, match=sentence):
        pack(value, with_classes=True)


def test_a_class_that_the_receiver_has_not_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = [pack(value, with_classes=True) for value in (Config(0.5), Color.RED)]
    monkeypatch.setattr(sys.modules[__name__], "Config", print)
    monkeypatch.setattr(Color, "_member_map_", {})
    with pytest.raises(
        ShapeError, match=r"Config has come, a class that this process has not loaded\. Import .* on all"
    ):
        unpack(packed[0], with_classes=True)
    with pytest.raises(ShapeError, match=r"Color has come that this process cannot build: 'RED'"):
        unpack(packed[1], with_classes=True)
    # Whatever the sender names: nothing is called, nothing is imported.
    for module, name in (("os", "system"), ("subprocess", "Popen"), ("antigravity", "x"), ("builtins", "eval")):
        forged = msgpack.packb(msgpack.ExtType(7, pack([module, name, {"args": "true"}])))
        with pytest.raises(ShapeError, match=r"has not loaded|cannot build"):
            unpack(forged, with_classes=True)
    assert "antigravity" not in sys.modules


def test_a_dtensor_is_refused_by_its_own_remedy() -> None:
    def body() -> str:
        part = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
        with pytest.raises(ShapeError) as caught:
            all_gather_object([None, None], {"weight": part})
        return str(caught.value)

    for text in run_threads(2, body):
        assert "a DTensor is a part on each rank. Send its full_tensor(), or its to_local()." in text
