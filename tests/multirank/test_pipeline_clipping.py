"""Gradients clipped by the norm of a whole pipeline's: as one process clips those of the whole model."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

import disttrain
from disttrain.dtensor import DTensor, Replicate, Shard, distribute_tensor
from disttrain.errors import ScheduleError
from disttrain.fsdp2 import fully_shard
from disttrain.pipelining import PipelineStage, Schedule1F1B, clip_grad_norm_, get_schedule_class, split_blocks
from disttrain.testing import run_threads
from disttrain.testing.pytest_plugin import on_ranks

NORM_TYPES = (0.5, 1.0, 2.0, 3.0, math.inf)
DIM, VOCABULARY = 6, 10

Given = Sequence[tuple[tuple[int, ...], bool]]
"""The shapes of a rank's parameters, and whether each has a gradient."""

# Of three ranks: one has an empty parameter and one without a gradient, one has no gradients, one a single number.
RANKS: Sequence[Given] = (
    [((5, 3), True), ((0, 4), True), ((2,), False), ((7,), True)],
    [((3, 3), False)],
    [((), True)],
)


def made(given: Given, seed: int, dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(seed)
    parameters = []
    for shape, has_grad in given:
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
        if has_grad:
            parameter.grad = torch.randn(shape, dtype=dtype, generator=random)
        parameters.append(parameter)
    return parameters


def grads_of(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in parameters]


def clip_own(max_norm: float, norm_type: float, foreach: bool) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    parameters = made(RANKS[disttrain.get_rank()], disttrain.get_rank())
    return clip_grad_norm_(parameters, max_norm, norm_type, foreach=foreach), grads_of(parameters)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_parameters_of_three_ranks(norm_type: float, foreach: bool, max_norm: float) -> None:
    whole = [made(given, rank) for rank, given in enumerate(RANKS)]
    flat = [parameter for own in whole for parameter in own if parameter.numel()]
    expected = nn.utils.clip_grad_norm_(flat, max_norm, norm_type, foreach=foreach)
    for own, (norm, grads) in zip(whole, run_threads(3, clip_own, max_norm, norm_type, foreach), strict=True):
        torch.testing.assert_close(norm, expected)
        torch.testing.assert_close(grads, grads_of(own))


@on_ranks(3)
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_over_real_transports(norm_type: float) -> None:
    flat = [one for rank, given in enumerate(RANKS) for one in made(given, rank) if one.numel()]
    expected = nn.utils.get_total_norm([one.grad for one in flat if one.grad is not None], norm_type)
    torch.testing.assert_close(clip_own(1.0, norm_type, True)[0], expected)


def tied_model(num_blocks: int) -> nn.Sequential:
    """Whose embedding is its head as well."""
    torch.manual_seed(0)
    embedding, head = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY, bias=False)
    head.weight = embedding.weight
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(num_blocks)))
    return nn.Sequential(OrderedDict(embedding=embedding, blocks=blocks, head=head)).double()


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits, target)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (16,), generator=torch.Generator().manual_seed(1))
    return tokens, tokens.roll(1)


def clip_stages(
    whole: nn.Sequential, name: str, stages_per_rank: int, norm_type: float
) -> tuple[float, dict[str, torch.Tensor]]:
    rank, num_stages = disttrain.get_rank(), disttrain.get_world_size() * stages_per_rank
    split = split_blocks(copy.deepcopy(whole), num_stages)
    own = (rank,) if stages_per_rank == 1 else (rank, num_stages - 1 - rank)
    schedule = get_schedule_class(name)([split.build_stage(stage, "cpu") for stage in own], 8, loss_fn)
    tokens, target = batch()
    schedule.step(tokens, target=target)
    norm = clip_grad_norm_(schedule, 1e-3, norm_type)
    named = [one for stage in schedule.stages.values() for one in stage.submod.named_parameters()]
    return norm.item(), {name: parameter.grad for name, parameter in named if parameter.grad is not None}


@pytest.mark.parametrize(("name", "num_ranks", "stages_per_rank"), [("1F1B", 2, 1), ("1F1B", 4, 1), ("ZBV", 2, 2)])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_a_tied_weight_counts_once(name: str, num_ranks: int, stages_per_rank: int, norm_type: float) -> None:
    """Whether its stages are on two ranks, or on one as with ZBV."""
    whole = tied_model(num_ranks * stages_per_rank)
    copied = copy.deepcopy(whole)
    tokens, target = batch()
    loss_fn(whole(tokens), target).backward()
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 1e-3, norm_type)
    grads = {name: parameter.grad for name, parameter in whole.named_parameters(remove_duplicate=False)}
    found_names = set()
    for norm, found in run_threads(num_ranks, clip_stages, copied, name, stages_per_rank, norm_type):
        assert norm == pytest.approx(expected.item())
        for of_parameter, grad in found.items():
            torch.testing.assert_close(grad, grads[of_parameter])
        found_names |= found.keys()
    assert found_names | {"head.weight"} == grads.keys()


def clip_sharded(whole: nn.Sequential) -> tuple[float, dict[str, torch.Tensor]]:
    """Two stages, each sharded over two ranks, which have half of the batch each."""
    mesh = disttrain.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    split = split_blocks(copy.deepcopy(whole), 2)
    stage = mesh["pp"].get_local_rank()
    fully_shard(split.stages[stage], mesh=mesh["dp"])
    schedule = Schedule1F1B(split.build_stage(stage, "cpu", mesh["pp"].get_group()), 4, loss_fn)
    tokens, target = (one.chunk(2)[mesh["dp"].get_local_rank()] for one in batch())
    schedule.step(tokens, target=target)
    norm = clip_grad_norm_(schedule, 1e-3)
    found = {}
    for name, parameter in schedule.stages[stage].submod.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        found[name] = parameter.grad.full_tensor()
    return norm.item(), found


def test_sharded_stages_with_a_tied_weight() -> None:
    whole = tied_model(2)
    copied = copy.deepcopy(whole)
    tokens, target = batch()
    loss_fn(whole(tokens), target).backward()
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 1e-3)
    grads = {name: parameter.grad for name, parameter in whole.named_parameters(remove_duplicate=False)}
    for norm, found in run_threads(4, clip_sharded, copied):
        assert norm == pytest.approx(expected.item())
        for name, grad in found.items():
            torch.testing.assert_close(grad, grads[name])


def clip_dtensors(norm_type: float) -> tuple[bool, float, list[torch.Tensor]]:
    """Of each of two stages on two ranks: a matrix cut along `tp`, a copied one on the mesh of both, a plain one."""
    mesh = disttrain.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    stage = mesh["pp"].get_local_rank()
    flat = disttrain.DeviceMesh("cpu", torch.tensor([2 * stage, 2 * stage + 1]), mesh_dim_names=("dp",))
    lays: Sequence[Callable[[torch.Tensor], torch.Tensor]] = (
        lambda value: distribute_tensor(value, mesh["tp"], [Shard(0)]),
        lambda value: distribute_tensor(value, flat, [Replicate()]),
        lambda value: value,
    )
    parameters = []
    for lay, plain in zip(lays, made([((4, 2), True)] * 3, stage), strict=True):
        parameters.append(nn.Parameter(lay(plain.detach())))
        assert plain.grad is not None
        parameters[-1].grad = lay(plain.grad)
    norm = clip_grad_norm_(parameters, 0.5, norm_type, group=mesh["pp"].get_group())
    grads = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in map(_grad, parameters)]
    return isinstance(norm, DTensor), norm.item(), grads


def _grad(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_dtensors_on_several_meshes(norm_type: float) -> None:
    whole = [made([((4, 2), True)] * 3, stage) for stage in (0, 1)]
    expected = nn.utils.clip_grad_norm_([one for own in whole for one in own], 0.5, norm_type)
    for rank, (is_dtensor, norm, grads) in enumerate(run_threads(4, clip_dtensors, norm_type)):
        assert not is_dtensor
        assert norm == pytest.approx(expected.item())
        torch.testing.assert_close(grads, grads_of(whole[rank // 2]))


def clip_mixed() -> torch.Tensor:
    dtype = (torch.bfloat16, torch.float32)[disttrain.get_rank()]
    return clip_grad_norm_(made([((4,), True)], 0, dtype), 1.0)


def test_dtypes_that_differ_by_rank() -> None:
    grads = [_grad(made([((4,), True)], 0, dtype)[0]).float() for dtype in (torch.bfloat16, torch.float32)]
    for norm in run_threads(2, clip_mixed):
        assert norm.dtype == torch.float32
        # The norm of the first one's is rounded to that dtype.
        torch.testing.assert_close(norm, torch.cat(grads).norm(), rtol=1e-2, atol=0)


def clip_nonfinite(value: float, norm_type: float) -> tuple[float, str]:
    """What it returns, and what it raises when it is asked to."""
    parameters = made([((3,), True)], 0)
    if disttrain.get_rank() == 1:
        _grad(parameters[0])[1] = value
    with pytest.raises(ScheduleError) as caught:
        clip_grad_norm_(parameters, 1.0, norm_type, error_if_nonfinite=True)
    return clip_grad_norm_(parameters, 1.0, norm_type).item(), str(caught.value)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_on_one_rank_is_so_on_all(value: float, norm_type: float) -> None:
    for rank, (norm, text) in enumerate(run_threads(3, clip_nonfinite, value, norm_type)):
        assert str(norm) == str(value)
        assert f"the norm of order {norm_type} of the pipeline's gradients is {value}" in text
        assert f"[rank {rank}]" in text


def test_what_cannot_be() -> None:
    def refused() -> tuple[str, str]:
        with pytest.raises(ScheduleError) as no_norm:
            clip_grad_norm_(made([((3,), True)], 0), 1.0, 0)
        schedule = Schedule1F1B(PipelineStage(nn.Linear(2, 2), disttrain.get_rank(), 2, "cpu"), 2, loss_fn)
        with pytest.raises(ScheduleError) as too_early:
            clip_grad_norm_(schedule, 1.0)
        return str(no_norm.value), str(too_early.value)

    for no_norm, too_early in run_threads(2, refused):
        assert "norm_type is 0" in no_norm
        assert "no step has been run" in too_early
