"""Steps that are recorded once and replayed give the values of steps that run as they are."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import disttrain
from disttrain import kernels
from disttrain.compiling import capture_step
from disttrain.errors import BackendError, CompileError, DisttrainError
from disttrain.fsdp2 import MixedPrecisionPolicy, fully_shard
from disttrain.testing.pytest_plugin import on_ranks
from tests.gpu.ranks import NUM_GPU_RANKS

DIM, NUM_STEPS = 32, 9
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: kernels.AdamW(params, lr=1e-2, max_norm=1.0),
    "AdamW in bf16": lambda params: kernels.AdamW(params, lr=1e-2, state_dtype=torch.bfloat16),
    "Lion": lambda params: kernels.Lion(params, lr=1e-3, weight_decay=0.1),
    "SGD": lambda params: kernels.SGD(params, lr=1e-2, momentum=0.9),
    "torch": lambda params: torch.optim.AdamW(
        params, lr=torch.tensor(1e-2, device="cuda"), fused=True, capturable=True
    ),
}


def model_of(dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    blocks = (
        nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * DIM, DIM))
        for _ in range(3)
    )
    return nn.Sequential(*blocks).cuda().to(dtype)


class Training:
    """One step, and what it works on."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, zeroes_first: bool = False) -> None:
        self.model, self.optimizer, self.zeroes_first = model, optimizer, zeroes_first

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.zeroes_first:
            self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(x).float(), y.float())
        loss.backward()
        self.optimizer.step()
        if not self.zeroes_first:
            self.optimizer.zero_grad()
        return loss


def batch(index: int, rows: int = 8, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(
        index + 1000 * (disttrain.get_rank() if disttrain.is_initialized() else 0)
    )
    x = torch.randn(rows, DIM, generator=generator).cuda()
    return x.to(dtype), x.roll(1, 0).tanh().to(dtype)


def curve(
    training: Training, step: Callable[..., torch.Tensor], num_steps: int = NUM_STEPS, **of_batch: Any
) -> list[float]:
    torch.manual_seed(1)
    return [step(*batch(index, **of_batch)).item() for index in range(num_steps)]


def assert_alike(make: Callable[[], Training], num_graphs: int = 1, **of_batch: Any) -> Training:
    """Two trainings, one captured; returns that."""
    plain, other = make(), make()
    expected = curve(plain, plain.step, **of_batch)
    captured = capture_step(other.step)
    assert curve(other, captured, **of_batch) == expected
    assert captured.num_graphs == num_graphs
    for parameter, wanted in zip(other.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(parameter.detach(), wanted.detach())
    return other


@pytest.mark.parametrize("zeroes_first", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_of_each_optimizer(name: str, zeroes_first: bool) -> None:
    def make() -> Training:
        model = model_of()
        return Training(model, OPTIMIZERS[name](model.parameters()), zeroes_first=zeroes_first)

    assert_alike(make)


def test_half_precision_with_masters_and_without() -> None:
    for keep_master in (True, False):

        def make(keep_master: bool = keep_master) -> Training:
            model = model_of(torch.bfloat16)
            return Training(model, kernels.AdamW(model.parameters(), lr=1e-2, keep_master=keep_master))

        assert_alike(make, dtype=torch.bfloat16)


def test_dropout_draws_what_it_would_draw() -> None:
    def make() -> Training:
        model = model_of(dropout=0.5)
        return Training(model, kernels.AdamW(model.parameters(), lr=1e-2))

    assert_alike(make)


@pytest.mark.parametrize("name", ["AdamW", "torch"])
def test_a_schedule_of_rates(name: str) -> None:
    curves = []
    for is_captured in (False, True):
        model = model_of()
        optimizer = OPTIMIZERS[name](model.parameters())
        training = Training(model, optimizer)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        step = capture_step(training.step) if is_captured else training.step
        losses = []
        for index in range(NUM_STEPS):
            losses.append(step(*batch(index)).item())
            schedule.step()
        curves.append(losses)
    assert curves[0] == curves[1]


def test_loads_evaluations_and_steps_as_they_are_between_replays() -> None:
    curves = []
    for is_captured in (False, True):
        model = model_of()
        training = Training(model, kernels.AdamW(model.parameters(), lr=1e-2))
        step = capture_step(training.step) if is_captured else training.step
        losses, saved = [], {}
        for index in range(20):
            if index == 8:
                saved = {name: value.clone() for name, value in model.state_dict().items()}
                saved_optimizer = training.optimizer.state_dict()
                saved_optimizer = {
                    **saved_optimizer,
                    "state": {k: {n: v.clone() for n, v in s.items()} for k, s in saved_optimizer["state"].items()},
                }
            if index == 12:
                model.load_state_dict(saved)
                training.optimizer.load_state_dict(saved_optimizer)
            if index % 5 == 4:
                model.eval()
                with torch.no_grad():
                    losses.append(model(batch(99)[0]).square().mean().item())
                model.train()
            losses.append((training.step if index % 6 == 5 else step)(*batch(index)).item())
        curves.append(losses)
    assert curves[0] == curves[1]


def test_gradients_that_are_summed_up_outside() -> None:
    curves = []
    for is_captured in (False, True):
        model = model_of()
        optimizer = kernels.AdamW(model.parameters(), lr=1e-2)

        def accumulate(x: torch.Tensor, y: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        step = capture_step(accumulate) if is_captured else accumulate
        losses = []
        for index in range(24):
            losses.append(step(*batch(index)).item())
            if index % 3 == 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=index % 2 == 0)
        curves.append(losses)
    assert curves[0] == curves[1]


def test_each_form_has_a_recording_up_to_a_bound() -> None:
    model = model_of()
    training = Training(model, kernels.SGD(model.parameters(), lr=1e-2))
    step = capture_step(training.step, num_warmups=1, max_graphs=2)
    plain = model_of()
    expected = Training(plain, kernels.SGD(plain.parameters(), lr=1e-2))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for index in range(12):
            rows = 4 + index % 4
            assert step(*batch(index, rows)).item() == expected.step(*batch(index, rows)).item()
    assert step.num_graphs == 2
    assert [str(each.message) for each in told if "capture_step" in str(each.message)] == [
        "capture_step: the step runs as it is, since there are 2 recordings already: see max_graphs."
    ]


def test_what_has_changed_is_recorded_anew() -> None:
    model = model_of(dropout=0.5)
    training = Training(model, kernels.SGD(model.parameters(), lr=1e-2))
    step = capture_step(training.step)

    def recorded(num_graphs: int) -> None:
        for index in range(5):
            step(*batch(index))
        assert step.num_graphs == num_graphs

    recorded(1)
    model.eval()
    recorded(2)
    model[0][0].weight.requires_grad_(False)
    before = model[0][0].weight.clone()
    recorded(3)
    assert torch.equal(model[0][0].weight, before)
    calls: list[int] = []
    handle = model[1].register_forward_hook(lambda *_: calls.append(1))
    recorded(4)
    assert calls == [1] * 4
    handle.remove()
    recorded(4)
    model[2] = nn.Linear(DIM, DIM).cuda()
    training.optimizer.add_param_group({"params": list(model[2].parameters())})
    before = model[2].weight.detach().clone()
    recorded(5)
    assert not torch.equal(model[2].weight, before)


class Forgetful(Training):
    """Its rate is a number of the host that changes in each step."""

    calls = 0

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().step(x * self.calls, y)


def test_comparisons_find_what_the_host_computes() -> None:
    model = model_of(dropout=0.5)
    training = Training(model, kernels.AdamW(model.parameters(), lr=1e-2, max_norm=1.0))
    plain = model_of(dropout=0.5)
    expected = Training(plain, kernels.AdamW(plain.parameters(), lr=1e-2, max_norm=1.0))
    captured = capture_step(training.step, compare_every=2)
    assert curve(training, captured) == curve(expected, expected.step)
    model = model_of()
    forgetful = Forgetful(model, kernels.AdamW(model.parameters(), lr=1e-2))
    captured = capture_step(forgetful.step, compare_every=1)
    with pytest.raises(CompileError, match=r"as it is for .*parameter 0\.0\.weight"):
        curve(forgetful, captured)


def refused(make: Callable[[nn.Module], Callable[..., Any]], *args: Any) -> str:
    step = capture_step(make(model_of()), num_warmups=1)

    def call_twice() -> None:
        step(*args)
        step(*args)

    with pytest.raises(DisttrainError) as raised:
        call_twice()
    torch.cuda.synchronize()
    return str(raised.value)


def test_what_cannot_be_recorded_says_its_line() -> None:
    def waits(model: nn.Module) -> Callable[..., Any]:
        def step(x: torch.Tensor) -> torch.Tensor:
            y = model(x).sum()
            return y * 2 if y.item() > 0 else y  # here

        return step

    assert "# here" in refused(waits, batch(0)[0])
    assert "returns a value of type int" in refused(lambda _: lambda x: x.ndim, batch(0)[0])
    assert "lies on cpu" in refused(lambda model: lambda x: model(x.cuda()), batch(0)[0].cpu())
    assert "is of type bytearray" in refused(lambda _: lambda x, y: x, batch(0)[0], bytearray())
    # The process goes on.
    model = model_of()
    training = Training(model, kernels.SGD(model.parameters(), lr=1e-2))
    curve(training, capture_step(training.step))


def test_a_recording_within_a_recording_is_refused() -> None:
    inner = capture_step(lambda x: x * 2)

    def make(_: nn.Module) -> Callable[..., Any]:
        return lambda x: inner(x) + 1

    assert "while a graph is being recorded" in refused(make, batch(0)[0])


def test_others_graphs_are_refused_by_our_optimizers() -> None:
    model = model_of()
    training = Training(model, kernels.AdamW(model.parameters()))
    training.step(*batch(0))
    x, y = batch(1)
    with pytest.raises(BackendError, match="capture_step"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        training.step(x, y)


SHARDED = [{}, {"reshard_after_forward": False}]


@on_ranks(NUM_GPU_RANKS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("sharding", SHARDED, ids=str)
def test_two_hundred_steps_of_sharded_models(name: str, sharding: dict[str, Any]) -> None:
    mesh = disttrain.init_device_mesh("cuda", (disttrain.get_world_size(),))

    def make() -> Training:
        model = model_of()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model:
            fully_shard(block, mesh=mesh, mp_policy=policy, **sharding)
        fully_shard(model, mesh=mesh, mp_policy=policy, **sharding)
        optimizer = OPTIMIZERS[name](model.parameters())
        if name.startswith("AdamW"):
            model.round_in_step(optimizer)
        return Training(model, optimizer)

    plain, other = make(), make()
    expected = curve(plain, plain.step, 200)
    captured = capture_step(other.step)
    steps = [captured if index % 7 != 6 else other.step for index in range(200)]
    torch.manual_seed(1)
    assert [step(*batch(index)).item() for index, step in enumerate(steps)] == expected
    assert captured.num_graphs == 1


def repeat(step: Callable[[torch.Tensor], Any], x: torch.Tensor) -> None:
    """As often as it takes to be recorded."""
    for _ in range(6):
        step(x)


def bytes_kept_by_two_streams() -> int:
    """Bytes that the allocator has not got back of tensors that two streams have used."""
    side = torch.cuda.Stream()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        tensor = torch.ones(1 << 24, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            tensor.add_(1)
        tensor.record_stream(side)
        del tensor
        torch.cuda.synchronize()
    torch.empty(1, device="cuda")
    return torch.cuda.memory_allocated() - before


@pytest.mark.parametrize("failing", ["item", "raise"])
def test_a_recording_that_fails_leaves_nothing_behind(failing: str) -> None:
    """The stream, the allocator and random numbers are as before, also those of a graph that was recorded earlier."""

    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    def refused(x: torch.Tensor) -> torch.Tensor:
        total = noisy(x).sum()
        if failing == "item":
            total.item()
        elif torch.cuda.is_current_stream_capturing():
            raise ValueError("the user's")
        return total

    x = torch.zeros(1000, device="cuda")
    earlier = capture_step(noisy)
    repeat(earlier, x)
    assert earlier.num_graphs == 1
    torch.manual_seed(5)
    expected = [earlier(x), torch.rand(1000, device="cuda")]
    stream, kept = torch.cuda.current_stream(), bytes_kept_by_two_streams()
    with pytest.raises((CompileError, ValueError)):
        repeat(capture_step(refused), x)
    assert torch.cuda.current_stream() == stream
    torch.manual_seed(5)
    for result, wish in zip([earlier(x), torch.rand(1000, device="cuda")], expected, strict=True):
        assert torch.equal(result, wish)
    assert bytes_kept_by_two_streams() == kept
    # Another form of a step that was refused for one is recorded all the same.
    either = capture_step(lambda x: refused(x) if len(x) > 1000 else noisy(x))
    large = torch.zeros(2000, device="cuda")
    with pytest.raises((CompileError, ValueError)):
        repeat(either, large)
    repeat(either, x)
    assert either.num_graphs == 1
