"""What tensor parallel refuses: one clear error, on all ranks alike, with nothing half cut."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import disttrain
from disttrain.dtensor import DTensor, Replicate, Shard
from disttrain.errors import LayoutError, MeshError, ShardingError
from disttrain.mesh import DeviceMesh
from disttrain.testing import run_threads
from disttrain.tp import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from tests.cases.tensor_parallel import Attention, Decoder, GatedMLP, decoder_plan

NUM_RANKS = 2


def mesh_of_two() -> DeviceMesh:
    return disttrain.init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("tp",))


def refused(make: Callable[[], nn.Module], plan: Callable[[], Any], *words: str) -> None:
    """Every rank gets a ShardingError with these words in it, and no parameter and no class is another than before."""
    module = make()

    def on_rank() -> str:
        own = copy.deepcopy(module)
        before = dict(own.named_parameters(remove_duplicate=False))
        classes = [type(part) for part in own.modules()]
        mesh = mesh_of_two()
        with pytest.raises(ShardingError) as found:
            parallelize_module(own, mesh, plan())
        after = dict(own.named_parameters(remove_duplicate=False))
        assert before.keys() == after.keys()
        assert all(before[name] is after[name] for name in before)
        assert [type(part) for part in own.modules()] == classes
        assert not any(part._forward_pre_hooks or part._forward_hooks for part in own.modules())
        return str(found.value)

    for message in run_threads(NUM_RANKS, on_rank):
        for word in words:
            assert word in message


def refused_in_forward(module: nn.Module, plan: Any, x: Callable[[DeviceMesh], Any], *words: str) -> None:
    def on_rank() -> str:
        mesh = mesh_of_two()
        own = parallelize_module(copy.deepcopy(module), mesh, plan())
        with pytest.raises(LayoutError) as found:
            own(x(mesh))
        return str(found.value)

    for message in run_threads(NUM_RANKS, on_rank):
        for word in words:
            assert word in message


# Each plan begins with a style that fits, which must not have been applied.
FIRST = {"gate": ColwiseParallel()}


@pytest.mark.parametrize(
    ("style", "words"),
    [
        (ColwiseParallel(head_dim=4), ("3 heads of 4", "2 ranks", "divisor of 3", "1, 3")),
        (ColwiseParallel(head_dim=5), ("12 outputs", "heads of 5", "head_dim")),
        (ColwiseParallel(num_blocks=5), ("12 outputs", "5 equal blocks", "num_blocks")),
        (ColwiseParallel(num_blocks=4), ("blocks of 3 outputs", "2 ranks", "1, 3")),
        (ColwiseParallel(num_blocks=3, head_dim=3), ("4 outputs", "heads of 3")),
        (ColwiseParallel(input_layouts=(Shard(1),)), ("input_layouts", "(Shard(1),)", "one placement")),
        (RowwiseParallel(output_layouts="Shard(1)"), ("output_layouts", "'Shard(1)'", "one placement")),
    ],
    ids=repr,
)
def test_layers_that_do_not_divide(style: ParallelStyle, words: tuple[str, ...]) -> None:
    refused(lambda: GatedMLP(6, 12), lambda: {**FIRST, "up": style}, *words)


@pytest.mark.parametrize("style", [ColwiseParallel(), RowwiseParallel()], ids=repr)
@pytest.mark.parametrize(
    "make", [lambda: nn.Bilinear(2, 2, 2), lambda: nn.LayerNorm(6), lambda: nn.ConvTranspose1d(2, 2, 2)]
)
def test_modules_that_a_style_does_not_know(style: ParallelStyle, make: Callable[[], nn.Module]) -> None:
    name = type(make()).__name__
    refused(
        lambda: nn.ModuleDict({"gate": nn.Linear(4, 4), "other": make()}),
        lambda: {**FIRST, "other": style},
        type(style).__name__, name, "nn.Linear", "ParallelStyle",
    )  # fmt: skip


def test_heads_of_what_has_none() -> None:
    refused(
        lambda: nn.ModuleDict({"gate": nn.Linear(4, 4), "table": nn.Embedding(6, 4)}),
        lambda: {**FIRST, "table": ColwiseParallel(head_dim=2)},
        "Embedding", "head_dim", "linear layers",
    )  # fmt: skip


@pytest.mark.parametrize("style", [ColwiseParallel(), RowwiseParallel()], ids=repr)
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: weight_norm(nn.Linear(4, 4)), ("ParametrizedLinear", "computed", "parametrization")),
        (lambda: nn.LazyLinear(4), ("LazyLinear", "no shape yet", "sizes")),
    ],
)
def test_weights_that_are_not_there(
    style: ParallelStyle, make: Callable[[], nn.Module], words: tuple[str, ...]
) -> None:
    def on_rank() -> str:
        module = nn.ModuleDict({"gate": nn.Linear(4, 4), "other": make()})
        with pytest.raises(ShardingError) as found:
            parallelize_module(module, mesh_of_two(), {**FIRST, "other": style})
        assert type(module["gate"]) is nn.Linear
        return str(found.value)

    for message in run_threads(NUM_RANKS, on_rank):
        for word in words:
            assert word in message


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("gat", ("'gat'", "GatedMLP", "'gate'")),
        ("*.gate", ("'*.gate'", "GatedMLP")),
        ("layers.*.zzz", ("'layers.*.zzz'", "'gate'", "'up'", "'down'")),
    ],
)
def test_keys_that_match_nothing(key: str, words: tuple[str, ...]) -> None:
    refused(GatedMLP, lambda: {**FIRST, key: ColwiseParallel()}, *words)


@pytest.mark.parametrize("plan", [None, "colwise", {"gate": "colwise"}, [ColwiseParallel()], {"gate": ColwiseParallel}])
def test_what_is_no_plan(plan: Any) -> None:
    refused(GatedMLP, lambda: plan, "no plan", "ParallelStyle")


def test_a_module_that_two_keys_cut() -> None:
    refused(GatedMLP, lambda: {**FIRST, "[gu]*": ColwiseParallel()}, "two styles", "'gate'")
    refused(GatedMLP, lambda: {**FIRST, "ga*": RowwiseParallel()}, "two styles", "'gate'")
    refused(GatedMLP, lambda: {**FIRST, "g*": SequenceParallel()}, "two styles", "'gate'")

    def make() -> nn.Module:
        both = GatedMLP(6, 6)
        both.down = both.gate
        return both

    refused(make, lambda: {**FIRST, "down": RowwiseParallel()}, "two styles", "'gate' and 'down'", "one module")


def test_a_module_that_is_cut_already() -> None:
    def on_rank() -> None:
        mesh = mesh_of_two()
        module = parallelize_module(GatedMLP(), mesh, {"gate": ColwiseParallel()})
        with pytest.raises(ShardingError, match="cut already"):
            parallelize_module(module, mesh, {"up": ColwiseParallel(), "gate": ColwiseParallel()})
        with pytest.raises(ShardingError, match="cut already"):
            parallelize_module(module, mesh, {"up": ColwiseParallel(), "gate": SequenceParallel()})
        assert type(module.up) is nn.Linear
        # What is left is cut later.
        parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        table = parallelize_module(nn.Embedding(4, 4), mesh, ColwiseParallel())
        with pytest.raises(ShardingError, match="Embedding, which another style has cut already"):
            parallelize_module(table, mesh, RowwiseParallel())

    run_threads(NUM_RANKS, on_rank)


def test_parameters_that_are_cut_already() -> None:
    def on_rank() -> None:
        mesh = mesh_of_two()
        module = GatedMLP()
        module.up.weight = nn.Parameter(
            disttrain.dtensor.distribute_tensor(module.up.weight.detach(), mesh, [Shard(1)])
        )
        with pytest.raises(ShardingError, match=r"weight of Linear is a DTensor already.*Shard\(1\)"):
            parallelize_module(module, mesh, {"gate": ColwiseParallel(), "up": ColwiseParallel()})
        assert type(module.gate) is nn.Linear

    run_threads(NUM_RANKS, on_rank)


def without(plan: dict[str, ParallelStyle], *names: str) -> dict[str, ParallelStyle]:
    return {name: style for name, style in plan.items() if name not in names}


def test_tied_parameters() -> None:
    make = lambda: Decoder(tied=True)  # noqa: E731
    plan = lambda: decoder_plan(2, sequence=True)  # noqa: E731
    refused(make, lambda: without(plan(), "head"), "head.weight", "not in it", "untie")
    refused(make, lambda: without(plan(), "embedding"), "embedding.weight", "not in it", "untie")
    refused(
        make,
        lambda: {**plan(), "embedding": ColwiseParallel()},
        "weight of Linear", "Shard(1)", "Shard(0)", "RowwiseParallel",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("style", "words"),
    [
        (
            PrepareModuleInput(input_layouts=[Shard(1), None], desired_input_layouts=[Replicate()]),
            ("2 input_layouts", "1 desired_input_layouts"),
        ),
        (PrepareModuleInput(desired_input_layouts=Replicate()), ("neither input_layouts nor input_kwarg_layouts",)),
        (
            PrepareModuleInput(
                input_kwarg_layouts={"x": Shard(1)}, desired_input_kwarg_layouts={"hidden": Replicate()}
            ),
            ("['x']", "['hidden']", "same names"),
        ),
        (
            PrepareModuleInput(input_layouts="Shard(1)", desired_input_layouts=Replicate()),
            ("input_layouts", "placement"),
        ),
        (
            PrepareModuleInput(input_kwarg_layouts={"x": 1}, desired_input_kwarg_layouts={"x": Replicate()}),
            ("'x'", "is 1", "placement"),
        ),
        (
            PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), shared_by=["gate", "zzz"]),
            ("shared_by", "['zzz']"),
        ),
        (
            PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=[Replicate(), None]),
            ("1 output_layouts", "2 desired_output_layouts"),
        ),
        (
            PrepareModuleInputOutput(
                input_layouts=Shard(1), desired_input_layouts=Replicate(),
                output_layouts=Shard(1), desired_output_layouts=[Replicate(), None],
            ),
            ("1 output_layouts", "2 desired_output_layouts"),
        ),
    ],
)  # fmt: skip
def test_layouts_that_do_not_fit_each_other(style: ParallelStyle, words: tuple[str, ...]) -> None:
    refused(GatedMLP, lambda: {**FIRST, "": style}, *words)


def test_meshes() -> None:
    def on_rank() -> None:
        mesh = disttrain.init_device_mesh("cpu", (1, NUM_RANKS), mesh_dim_names=("dp", "tp"))
        nameless = disttrain.init_device_mesh("cpu", (1, NUM_RANKS))
        module = GatedMLP()
        for given, words in [
            (mesh, r"2 axes.*mesh\['tp'\]"),
            (nameless, "2 axes.*mesh_dim_names"),
            (None, "the mesh is None"),
            ("tp", r"the mesh is a builtins\.str, which is none of"),
        ]:
            with pytest.raises(MeshError, match=words):
                parallelize_module(module, given, {"gate": ColwiseParallel()})
        assert type(module.gate) is nn.Linear

    run_threads(NUM_RANKS, on_rank)


def test_inputs_that_do_not_fit_their_layouts() -> None:
    def two(*count: int) -> Callable[[], ParallelStyle]:
        return lambda: PrepareModuleInput(input_layouts=[Shard(0)] * 2, desired_input_layouts=[Replicate()] * 2)

    refused_in_forward(nn.Linear(6, 6), two(), lambda _: torch.zeros(2, 6), "1 positional inputs", "2 input_layouts")
    refused_in_forward(
        nn.Identity(),
        lambda: PrepareModuleInput(input_layouts=[Shard(0)], desired_input_layouts=[Replicate()]),
        lambda _: "tokens",
        "Shard(0)", "str", "'tokens'", "None",
    )  # fmt: skip
    refused_in_forward(
        nn.Identity(),
        lambda: PrepareModuleOutput(output_layouts=[Shard(0), None], desired_output_layouts=[Replicate(), None]),
        lambda _: torch.zeros(2),
        "1 outputs", "2 output_layouts",
    )  # fmt: skip


STYLES = [
    (ColwiseParallel, nn.Linear(6, 6)),
    (lambda: ColwiseParallel(input_layouts=Shard(0)), nn.Linear(6, 6)),
    (RowwiseParallel, nn.Linear(6, 6)),
    (SequenceParallel, nn.LayerNorm(6)),
    (SequenceParallel, nn.Dropout(0.5)),
    (lambda: PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()), nn.Identity()),
    (lambda: PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate()), nn.Identity()),
]


@pytest.mark.parametrize(("style", "module"), STYLES)
def test_a_dtensor_of_another_mesh(style: Callable[[], ParallelStyle], module: nn.Module) -> None:
    def of_another_mesh(_mesh: DeviceMesh) -> torch.Tensor:
        # The same ranks, and yet another mesh, by its name.
        other = disttrain.init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("dp",))
        return DTensor.from_local(torch.zeros(2, 6), other, [Replicate()])

    refused_in_forward(module, style, of_another_mesh, "dp=2", "tp=2", "Redistribute")


def test_a_dim_that_the_tensor_does_not_have() -> None:
    linear, x = nn.Linear(6, 6), lambda _: torch.zeros(2, 4, 6)
    refused_in_forward(linear, lambda: ColwiseParallel(input_layouts=Shard(3)), x, "Shard(3)", "3 dims", "-3 to 2")
    refused_in_forward(linear, lambda: ColwiseParallel(output_layouts=Shard(-4)), x, "Shard(-4)", "3 dims")
    half = lambda _: torch.zeros(2, 4, 3)  # noqa: E731
    refused_in_forward(linear, lambda: RowwiseParallel(output_layouts=Shard(-4)), half, "Shard(-4)", "3 dims")


def test_plain_parts_of_uneven_wholes() -> None:
    refused_in_forward(
        nn.Linear(6, 6),
        lambda: RowwiseParallel(output_layouts=Shard(1)),
        lambda _: torch.zeros(2, 7, 3),
        "dim 1", "(2, 7, 6)", "2 ranks", "multiple of 2", "use_local_output=False",
    )  # fmt: skip
    refused_in_forward(
        nn.Linear(6, 6),
        lambda: ColwiseParallel(output_layouts=Shard(0)),
        lambda _: torch.zeros(7, 6),
        "dim 0", "(7, 6)", "multiple of 2",
    )  # fmt: skip
    refused_in_forward(
        nn.Identity(),
        lambda: PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(0), use_local_output=True
        ),
        lambda _: torch.zeros(7, 6),
        "dim 0", "(7, 6)", "multiple of 2",
    )  # fmt: skip


@pytest.mark.parametrize(("plan", "width"), [(ColwiseParallel(), 6), (RowwiseParallel(), 3)], ids=repr)
def test_second_derivatives(plan: ParallelStyle, width: int) -> None:
    def on_rank() -> None:
        module = parallelize_module(nn.Linear(6, 6), mesh_of_two(), copy.deepcopy(plan))
        x = torch.zeros(2, width, requires_grad=True)
        with pytest.raises(LayoutError, match="create_graph=True"):
            torch.autograd.grad(module(x).square().sum(), x, create_graph=True)

    run_threads(NUM_RANKS, on_rank)


def test_an_attention_whose_groups_do_not_fit() -> None:
    """Three heads of keys among two ranks: neither has one head, nor do they share one."""
    plan = lambda: {name: ColwiseParallel(head_dim=2) for name in ("query", "key", "value")}  # noqa: E731
    refused(lambda: Attention(12, 6, 3), plan, "3 heads of 2", "2 ranks", "1, 3")


def test_query_heads_that_ranks_share() -> None:
    refused_in_forward(
        Attention(4, 1, 1),
        lambda: {
            **{name: ColwiseParallel(head_dim=4) for name in ("query", "key", "value")},
            "out": RowwiseParallel(),
        },
        lambda _: torch.zeros(2, 3, 4),
        "4 columns", "takes 2 of 4", "fewer query heads than ranks",
    )  # fmt: skip
