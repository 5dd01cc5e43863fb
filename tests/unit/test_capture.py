"""capture_step without a GPU: forms of arguments, what a step refers to, what the host does at each replay."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from disttrain import kernels
from disttrain.compiling import capture_step
from disttrain.compiling._torch import tree_flatten
from disttrain.compiling.capture.forms import TensorForm, check_results, form_of
from disttrain.compiling.capture.graph import StepGraph
from disttrain.compiling.capture.subjects import Subjects, roots_of
from disttrain.errors import ArgumentError, CompileError, ShapeError
from disttrain.kernels.optimizers.recorded import Launch, RecordedStep
from disttrain.kernels.recording import Recording

GLOBAL = nn.Linear(2, 2)


class Training:
    def __init__(self) -> None:
        self.parts = {"model": nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))}
        self.optimizer = torch.optim.SGD(self.parts["model"].parameters(), lr=0.1)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts["model"](x)


def test_without_a_gpu_the_step_runs_as_it_is_and_says_so_once() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    step = capture_step(lambda x: x + 1)
    with pytest.warns(UserWarning, match=r"capture_step: the step runs as it is, since there is no GPU\."):
        assert step(1) == 2
    assert step(2) == 3


def test_numbers_that_make_no_sense_are_refused() -> None:
    for options in ({"num_warmups": 0}, {"max_graphs": 0}, {"compare_every": -1}):
        with pytest.raises(ShapeError, match="Give 1 or more"):
            capture_step(lambda x: x, **options)
    wrong: Any = 3
    with pytest.raises(ShapeError, match="the step is of type int"):
        capture_step(wrong)


def test_arguments_that_a_recording_cannot_read_are_refused() -> None:
    with pytest.raises(ShapeError, match="lies on cpu"):
        form_of([torch.zeros(2)], {})
    with pytest.raises(ArgumentError, match="an argument is of type bytearray"):
        form_of([bytearray()], {})
    assert form_of([1, {"a": "b"}], {"c": None})[0] == form_of([1, {"a": "b"}], {"c": None})[0]
    assert form_of([1], {})[0] != form_of([1.0], {})[0]
    assert form_of([1], {})[0] != form_of([True], {})[0]


def test_forms_of_tensors_differ_by_all_but_values() -> None:
    form = TensorForm((2,), (1,), torch.float32, torch.device("cuda", 0), False, None)
    assert form != form._replace(strides=(2,))
    assert form != form._replace(requires_grad=True)


def test_results_that_replays_could_not_compute_are_refused() -> None:
    check_results([None])
    for result, words in ((1.5, "returns a value of type float"), (torch.zeros(1), "returns a tensor on cpu")):
        with pytest.raises(CompileError, match=words):
            check_results([result])


def test_a_step_refers_to_what_its_object_closure_globals_and_partials_have() -> None:
    training, other = Training(), nn.Linear(1, 1)

    def closure(x: torch.Tensor) -> torch.Tensor:
        return other(GLOBAL(x))

    assert roots_of(training.step) == [training.parts["model"], training.optimizer]
    assert set(map(id, roots_of(closure))) == {id(other), id(GLOBAL)}
    assert roots_of(functools.partial(lambda model, x: model(x), other)) == [other]
    assert roots_of(closure, [training.optimizer])[0] is training.optimizer
    assert id(other) in map(id, roots_of([lambda: closure][0]))


def test_what_a_recording_depends_on_is_seen_to_change() -> None:
    training = Training()
    model = training.parts["model"]
    subjects = Subjects(roots_of(training.step))
    assert len(subjects.parameters) == 4
    states = [subjects.state()]

    def changed() -> bool:
        states.append(subjects.state())
        return states[-1] != states[-2]

    assert not changed()
    model.eval()
    assert changed()
    handle = model[0].register_forward_hook(lambda *_: None)
    assert changed()
    handle.remove()
    assert changed()
    # One in place of another: as many as before.
    handle = model[0].register_forward_hook(lambda *_: None)
    assert changed()
    handle.remove()
    model[0].register_forward_hook(lambda *_: 1)
    assert changed()
    assert not changed()
    model[0].weight.requires_grad_(False)
    assert changed()
    training.optimizer.param_groups[0]["lr"] = 0.2
    assert changed()
    assert subjects.holds(roots_of(training.step))
    assert subjects.state() is states[-1]
    assert Subjects(roots_of(training.step)).state() == states[-1]
    training.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert not subjects.holds(roots_of(training.step))
    subjects = Subjects(roots_of(training.step))
    assert subjects.state() != states[-1]
    model[1].register_buffer("more", torch.zeros(1))
    assert not subjects.holds(roots_of(training.step))
    subjects = Subjects(roots_of(training.step))
    assert subjects.holds(roots_of(training.step))
    model[0] = nn.Linear(2, 3)
    assert not subjects.holds(roots_of(training.step))


class FakeReplays:
    def begin(self, *, is_first: bool = False) -> None:
        pass

    def end(self) -> None:
        pass


def test_masters_are_not_compared_after_each_replay() -> None:
    """Nobody else has written to the parameters: to see that, no kernel is needed."""
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = kernels.AdamW([parameter], lr=0.1)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    rule, numbers = optimizer.rule(optimizer.param_groups[0], 1), torch.zeros(7, dtype=torch.int64)
    graph = StepGraph.__new__(StepGraph)
    graph.subjects, graph._inputs, graph._written = Subjects([optimizer]), [], [parameter]
    graph._new_grads, graph._results = [], []
    graph._structure = tree_flatten(())[1]
    graph._graph, graph._replays = SimpleNamespace(replay=lambda: None), FakeReplays()
    graph._host = Recording(numbers)
    graph._host.add(RecordedStep(optimizer, [Launch(optimizer.param_groups[0], [parameter], rule, numbers)]))
    graph.play_first([])
    for _ in range(2):
        with patch.object(torch, "where", wraps=torch.where) as compared:
            graph.play([])
        assert not compared.called
    with torch.no_grad():
        parameter.fill_(2.0)
    graph.play([])
    assert optimizer.state[parameter]["master"].tolist() == [2.0] * 3


@pytest.mark.parametrize("kind", [kernels.AdamW, kernels.Lion, functools.partial(kernels.SGD, momentum=0.9)])
def test_the_hosts_part_of_a_recorded_step_is_that_of_a_step(kind: Any) -> None:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    optimizer = kind(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    group = optimizer.param_groups[0]
    numbers = torch.zeros(7, dtype=torch.int64)
    part = RecordedStep(optimizer, [Launch(group, parameters, optimizer.rule(group, 1), numbers)])
    part.before_first()
    assert numbers[0] == 1
    group["lr"] = 0.5
    assert part.obstacle() == ""
    part.before_replay()
    part.after_replay()
    assert numbers[0] == 2
    assert numbers[1:2].view(torch.float32)[0] == torch.tensor(0.5)
    assert [optimizer.state[parameter]["step"].item() for parameter in parameters] == [2, 2]
    optimizer.step()
    assert [optimizer.state[parameter]["step"].item() for parameter in parameters] == [3, 3]
    optimizer.max_norm = 1.0
    assert "max_norm was None, and is 1.0" in part.obstacle()
    optimizer.max_norm = None
    optimizer.state[parameters[0]]["step"] += 1
    assert "not at the same step" in part.obstacle()
    optimizer.load_state_dict(optimizer.state_dict())
    assert "a state was loaded" in part.obstacle()
