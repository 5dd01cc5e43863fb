"""What one rank gets wrong, every rank is told within seconds, and nobody hangs."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import disttrain
from disttrain.errors import DisttrainError, ScheduleError
from disttrain.pipelining import PipelineSchedule, PipelineStage, get_schedule_class
from disttrain.store import TCPStore
from disttrain.testing.pytest_plugin import on_ranks
from tests.cases.pipelines import mean_square, mlp, rows

if TYPE_CHECKING:
    from tests.forkserver.process import ForkServer

SECONDS = 40
"""Much more than it takes, and much less than the timeout."""


@dataclass
class Setup:
    """How this rank makes its pipeline and calls it; `wrong` changes it on one rank."""

    index: int
    num_stages: int
    module: nn.Module
    num_microbatches: int = 4
    name: str = "1F1B"
    loss_fn: Any = mean_square
    stage_options: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    args: tuple[Any, ...] = ()
    step_options: dict[str, Any] = field(default_factory=dict)
    copies: int = 1
    has_grad: bool = True

    def make(self) -> PipelineSchedule:
        stages = [
            PipelineStage(self.module, self.index, self.num_stages, "cpu", **self.stage_options)
            for _ in range(self.copies)
        ]
        make = get_schedule_class(self.name)
        return make(stages, self.num_microbatches, loss_fn=self.loss_fn, **self.options)

    def run(self) -> None:
        runner = self.make()
        for _ in range(2):
            # Who has done all it can before another fails learns it in the next step.
            with torch.set_grad_enabled(self.has_grad):
                runner.step(*self.args, **self.step_options)


def setup() -> Setup:
    rank, size = disttrain.get_rank(), disttrain.get_world_size()
    found = Setup(rank, size, mlp(size)[rank])
    if rank == 0:
        found.args = (rows(8),)
    if rank == size - 1:
        found.step_options["target"] = rows(8, seed=2)
    return found


class Failing(nn.Module):
    """Raises in its forward or backward number `at`."""

    def __init__(self, module: nn.Module, at: int, when: str, what: Callable[[], None]) -> None:
        super().__init__()
        self.module, self.at, self.when, self.what = module, at, when, what
        self.count = 0

    def tick(self, *_: Any) -> None:
        self.count += 1
        if self.count == self.at:
            self.what()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.when == "forward":
            self.tick()
        output = self.module(x)
        if self.when == "backward":
            output.register_hook(self.tick)
        return output


def bad() -> None:
    raise ArithmeticError("bad batch")


def failing(at: int, when: str) -> Callable[[Setup], None]:
    def change(given: Setup) -> None:
        given.module = Failing(given.module, at, when, bad)

    return change


def change(**values: Any) -> Callable[[Setup], None]:
    def apply(given: Setup) -> None:
        for name, value in values.items():
            setattr(given, name, value)

    return apply


class Odd:
    """Nobody knows how to send it."""


class Returning(nn.Module):
    def __init__(self, module: nn.Module, value: Any) -> None:
        super().__init__()
        self.module, self.value = module, value

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x), self.value


def returning(value: Any) -> Callable[[Setup], None]:
    def apply(given: Setup) -> None:
        given.module = Returning(given.module, value)

    return apply


# By name: the rank that is wrong (-1: the last), how, and what all ranks' errors say.
ALONE: dict[str, tuple[int, Callable[[Setup], None], str]] = {
    "batch does not divide": (0, change(args=(rows(7),)), r"args\[0\] has size 7 in dim 0, which 4 microbatches"),
    "no batch": (0, change(args=()), r"missing 1 required positional argument"),
    "no target": (-1, change(step_options={}), "there is no target on the rank of the last stage"),
    "target does not divide": (-1, change(step_options={"target": rows(9)}), "target has size 9"),
    "loss of several numbers": (-1, change(loss_fn=lambda o, t: o - t), r"loss_fn returns a tensor of shape \[2, 6\]"),
    "loss is no tensor": (-1, change(loss_fn=lambda o, t: 1.0), "loss_fn returns float"),
    "loss without gradient": (-1, change(loss_fn=lambda o, t: o.detach().sum()), "the loss has no gradient"),
    "loss raises": (-1, change(loss_fn=lambda o, t: 1 / 0), "ZeroDivisionError: division by zero"),
    "microbatches differ": (1, change(num_microbatches=8), "n_microbatches is 4 on rank 0 of the pipeline, and 8 on"),
    "schedules differ": (1, change(name="GPipe"), "the schedule is 1F1B on .* and GPipe on"),
    "no loss function": (1, change(loss_fn=None), "loss_fn is given on rank 0 of the pipeline, and none on"),
    "dynamic on one rank": (0, change(options={"dynamic_shapes": True}), "dynamic_shapes is True on rank 0"),
    "stage of another rank": (1, change(index=0), r"rank 1 of the pipeline has stages \[0\]"),
    "another count of stages": (1, change(num_stages=6, name="Interleaved1F1B"), r"the schedule is"),
    "stages of 1F1B": (1, change(num_stages=6), "stages_per_rank is .; it takes exactly 1 stage per rank"),
    "stages do not divide": (1, change(num_stages=5), "5 stages cannot be shared equally by"),
    "a stage that is not": (1, change(index=9), "there is no stage 9 of"),
    "a stage twice": (1, change(copies=2), r"a stage is there twice: \[1, 1\]"),
    "too few microbatches": (1, change(name="ZBVZeroBubble", num_microbatches=1), "microbatches|stages_per_rank"),
    "dw_builder": (1, change(stage_options={"dw_builder": bad}), "dw_builder is given"),
    "no such weight": (1, change(stage_options={"tied": {"w": "0.other"}}), "no parameter '0.other'"),
    "tied to nobody": (1, change(stage_options={"tied": {"w": "0.weight"}}), "'w' is a tied weight of stage 1 alone"),
    "takes what is not there": (
        1,
        change(stage_options={"inputs": [(0, 3)]}),
        "stage 1 takes value 3 of stage 0, which returns 1 tensors",
    ),
    "takes from itself": (1, change(stage_options={"inputs": [(1, 0)]}), "stage 1 takes value 0 of stage 1"),
    "another input expected": (
        1,
        change(stage_options={"input_args": (torch.zeros(2, 5).double(),)}),
        r"what stage 1 is given holds float64\[2, 6\] where it held float64\[2, 5\] in input_args",
    ),
    "another output expected": (
        1,
        change(stage_options={"output_args": (torch.zeros(2, 6).double(),) * 2}),
        r"what stage 1 returns is nested as",
    ),
    "without gradients": (1, change(has_grad=False), "gradients are switched off"),
    "raises in the first forward": (1, failing(1, "forward"), "ArithmeticError: bad batch"),
    "raises in the last forward": (0, failing(4, "forward"), "ArithmeticError: bad batch"),
    "raises in the first backward": (-1, failing(1, "backward"), "ArithmeticError: bad batch"),
    "raises in the last backward": (0, failing(4, "backward"), "ArithmeticError: bad batch"),
    "hands on an object": (0, returning(Odd()), "a stage returns what cannot be told to the next one"),
    "hands on what the next cannot take": (0, returning(3), "takes 2 positional arguments but 3 were given"),
}


def text_of(error: BaseException) -> str:
    return str(error) if isinstance(error, DisttrainError) else f"{type(error).__name__}: {error}"


@on_ranks(2, 3)
@pytest.mark.parametrize("name", list(ALONE))
def test_what_one_rank_gets_wrong(name: str) -> None:
    """Its own error there, and one with its reason on all others; then the pipeline is of no more use."""
    wrong, apply, reason = ALONE[name]
    wrong %= disttrain.get_world_size()
    given = setup()
    if disttrain.get_rank() == wrong:
        apply(given)
    began_s = time.monotonic()
    with pytest.raises(Exception) as raised:  # noqa: PT011 -- of any kind; its text is looked at below
        given.run()
    assert time.monotonic() - began_s < SECONDS
    assert re.search(reason, text_of(raised.value)), repr(raised.value)


def steps(runner: PipelineSchedule, given: Setup) -> None:
    """Two: who has done all it can before another fails learns it in the second one."""
    for _ in range(2):
        runner.step(*given.args, **given.step_options)


@on_ranks(3)
@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("at", [1, 3])
def test_a_later_step_fails_and_a_new_pipeline_does_not(when: str, at: int) -> None:
    given = setup()
    if given.index == 1:
        # After two steps of four microbatches each.
        given.module = Failing(given.module, 8 + at, when, bad)
    runner = given.make()
    for _ in range(2):
        runner.step(*given.args, **given.step_options)
    began_s = time.monotonic()
    with pytest.raises((ArithmeticError, ScheduleError), match="bad batch") as raised:
        steps(runner, given)
    if given.index == 1:
        expected = f"in 1{'F' if when == 'forward' else 'B'}{at - 1}, which is an action of rank 1 of the pipeline"
        assert raised.value.__notes__ == [expected]
    assert time.monotonic() - began_s < SECONDS
    with pytest.raises(ScheduleError, match=r"an earlier step has failed: .*bad batch\. Make the pipeline anew"):
        runner.step(*given.args, **given.step_options)
    with pytest.raises(ScheduleError, match="an earlier step has failed"):
        runner.eval(*given.args)
    anew = setup().make()
    anew.step(*given.args, **given.step_options)
    for parameter in anew.stages[given.index].submod.parameters():
        assert parameter.grad is not None


@on_ranks(2)
@pytest.mark.parametrize("name", ["1F1B", "ForwardOnly"])
def test_shapes_that_change(name: str) -> None:
    given = setup()
    given.name = name
    if name == "ForwardOnly":
        given.loss_fn = None
    runner = given.make()
    runner.step(*given.args, **given.step_options)
    given.args = (rows(12),) if given.index == 0 else ()
    with pytest.raises(DisttrainError, match=r"what stage 0 returns for microbatch 0 holds float64\[3, 6\]") as raised:
        steps(runner, given)
    assert "dynamic_shapes=True" in str(raised.value) or given.index == 1


@on_ranks(2)
def test_ranks_wrong_alike() -> None:
    """Each has its own error, and the group goes on."""
    given = setup()
    given.name, given.num_microbatches = "DualPipeV", 1
    given.num_stages = 4
    with pytest.raises(ScheduleError, match="DualPipeV"):
        given.make()
    given = setup()
    given.make().step(*given.args, **given.step_options)


def test_no_such_schedule() -> None:
    with pytest.raises(ScheduleError, match=r"There is no schedule '1f2b'\. Did you mean 1F1B"):
        get_schedule_class("1f2b")
    assert get_schedule_class("zb-v").__name__ == "ScheduleZBVZeroBubble"


KILLED = """
import os, signal, sys, time, torch, disttrain
from tests.multirank.test_pipeline_failures import Failing, setup
from disttrain.errors import DisttrainError
from disttrain.store import TCPStore
when, rank, host, port = sys.argv[1:]
store = TCPStore(host, int(port), wait_for_workers=False)
disttrain.init_process_group("gloo", store=store, rank=int(rank), world_size=3, timeout=240)
given = setup()
if given.index == 1:
    given.module = Failing(given.module, 7, when, lambda: os.kill(os.getpid(), signal.SIGKILL))
runner = given.make()
runner.step(*given.args, **given.step_options)
began_s = time.monotonic()
try:
    for _ in range(2):
        runner.step(*given.args, **given.step_options)
except DisttrainError as error:
    print(f"{time.monotonic() - began_s:.1f}", error, flush=True)
    os._exit(0)
"""


@pytest.mark.sweep(1)
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_rank_is_killed(when: str, tmp_path: Path, fork_server: ForkServer) -> None:
    """In the middle of its second step: the others raise within seconds."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ranks = []
    try:
        for rank in range(3):
            arguments = (when, str(rank), store.host, str(store.port))
            ranks.append(fork_server.start(script, *arguments, environ=environ))
        codes = [rank.wait(360) for rank in ranks]
        outputs = [rank.stdout.read() for rank in ranks if rank.stdout is not None]
    finally:
        for rank in ranks:
            rank.close()
        store.close()
    assert codes == [0, -signal.SIGKILL, 0], outputs
    for output in (outputs[0], outputs[2]):
        seconds, _, text = output.partition(" ")
        assert float(seconds) < SECONDS
        assert "failed" in text
