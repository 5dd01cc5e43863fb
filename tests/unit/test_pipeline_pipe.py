"""A model cut along its graph gives what the whole gives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from disttrain.errors import ScheduleError
from disttrain.pipelining.model.pipe import Pipe, SplitPoint, pipe_split, pipeline
from tests.cases.tensor_parallel import Decoder

BEGINNING, END = SplitPoint.BEGINNING, SplitPoint.END


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, dict):
        value = list(value.values())
    return [value] if isinstance(value, torch.Tensor) else [one for one in value if one is not None]


def same_as_whole(model: nn.Module, args: tuple[Any, ...], split: Any, **kwargs: Any) -> Pipe:
    """Outputs, gradients, buffers and names, in fp64."""
    model = model.double()
    model.zero_grad()
    reference = copy.deepcopy(model)
    pipe = pipeline(model, args, kwargs, split)
    expected, found = reference(*args, **kwargs), pipe(*args, **kwargs)
    assert type(found) is type(expected)
    for one, other in zip(tensors(found), tensors(expected), strict=True):
        assert torch.equal(one, other)
    sum(one.square().sum() for one in tensors(expected)).backward()
    sum(one.square().sum() for one in tensors(found)).backward()
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-12, atol=1e-12)
    for (name, own), other in zip(model.named_buffers(), reference.buffers(), strict=True):
        assert torch.equal(own, other), name
    names = {name for stage in pipe.model.stages for name in stage.state_dict()}
    assert names == {name for name, _ in (*model.named_parameters(), *model.named_buffers())} & set(model.state_dict())
    of_stages = {parameter for stage in pipe.model.stages for parameter in stage.parameters()}
    assert of_stages == set(model.parameters())
    return pipe


@pytest.mark.parametrize("tied", [False, True])
def test_a_decoder(tied: bool) -> None:
    tokens = torch.randint(0, 16, (2, 6))
    split = {"blocks.1": BEGINNING, "blocks.2": END}
    pipe = same_as_whole(Decoder(num_blocks=4, tied=tied), (tokens,), split)
    assert pipe.num_stages == 3
    assert {name.partition(".mlp")[0] for name, _ in pipe.get_stage_module(1).named_parameters() if "mlp." in name} == {
        "blocks.1",
        "blocks.2",
    }
    assert pipe.model.wiring.ties == (((0, 2),) if tied else ())
    assert [dict(weight.names) for weight in pipe.model.tied] == (
        [{0: ("embedding.weight",), 2: ("embedding.weight",)}] if tied else []
    )
    assert (pipe.model.wiring.skips, pipe.inputs) == ((), ((), ((0, 0),), ((1, 0),)))


class Skipping(nn.Module):
    """With an input that is needed late, a buffer that changes, and a shape of outputs of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up = (nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.randn(4))
        self.register_buffer("table", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor, *, options: dict[str, Any]) -> dict[str, Any]:
        first = self.norm(self.down(x)).relu()
        a, b = first.chunk(2, 0)
        pipe_split()
        y = self.middle(first) * self.scale
        pipe_split()
        y = self.up(y + torch.cat([b, a])) + options["bias"]
        pipe_split()
        with torch.no_grad():
            table = self.table * 2
        return {"y": y * self.scale * table, "first": first, "nothing": None}


def test_skips_are_wired() -> None:
    options = {"bias": torch.randn(4).double(), "name": "text"}
    pipe = same_as_whole(Skipping(), (torch.randn(6, 4).double(),), None, options=options)
    assert pipe.num_stages == 4
    assert pipe.model.wiring.skips == ((0, 2), (0, 3))
    assert pipe.model.wiring.ties == ((1, 3),)
    assert all(source < place for place, given in enumerate(pipe.inputs) for source, _ in given)
    with pytest.raises(ScheduleError, match="Give those of the example"):
        pipe(torch.randn(6, 4))
    with pytest.raises(ScheduleError, match="not nested as"):
        pipe(torch.randn(6, 4), torch.ones(1), options=options)


def test_marks_with_nothing_between_make_one_cut() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    split = {"0": BEGINNING, "1": BEGINNING}
    assert same_as_whole(model, (torch.randn(2, 3).double(),), split).num_stages == 2
    assert same_as_whole(model, (torch.randn(2, 3).double(),), {"1": END}).num_stages == 1
    assert not model[1]._forward_hooks


def test_a_policy_cuts_the_graph() -> None:
    def before_each_linear(traced: Any) -> Any:
        for node in list(traced.graph.nodes):
            if node.target is torch.ops.aten.linear.default:
                with traced.graph.inserting_before(node):
                    traced.graph.call_function(torch.ops.disttrain.pipe_split.default)
        traced.recompile()
        return traced

    model = nn.Sequential(nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, 3))
    pipe = pipeline(model, (torch.ones(2, 3),), split_policy=before_each_linear)
    assert [list(stage.state_dict()) for stage in pipe.model.stages] == [
        [],
        ["1.weight", "1.bias"],
        ["2.weight", "2.bias"],
    ]
    with pytest.raises(ScheduleError, match="Both"):
        pipeline(model, (torch.ones(2, 3),), None, {}, before_each_linear)


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


def test_refusals() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(ScheduleError, match="no submodule 'layers'"):
        pipeline(nn.Linear(3, 3), (x,), None, {"layers": END})
    with pytest.raises(ScheduleError, match="Branching cannot be exported as one graph"):
        pipeline(Branching(), (x,))
    with pytest.raises(ScheduleError, match="no stage 1"):
        pipeline(nn.Linear(3, 3), (x,)).get_stage_module(1)
