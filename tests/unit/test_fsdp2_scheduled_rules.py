"""What scheduled modules send, keep in memory, wait for and refuse."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import disttrain
from disttrain.errors import ShardingError
from disttrain.fsdp2 import MixedPrecisionPolicy, fully_shard, share_comm_ctx
from disttrain.fsdp2.state import state_of
from disttrain.process_group import Call
from disttrain.testing import run_threads
from tests.cases.fsdp2 import SCATTER, recorded
from tests.cases.fsdp2_scheduled import (
    ONE_F_ONE_B,
    ZERO_BUBBLE,
    Pipeline,
    assert_same_gradients,
    backward_of,
    outermost,
    own_tokens,
    schedule,
    shard,
    two_stages,
)
from tests.multirank import models

GATHER = "all_gather_into_tensor"


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_gathers_nothing(reentrant: bool) -> None:
    class Saving(models.Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    class Outside(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self:
                is_block = isinstance(layer, models.Block)
                x = checkpoint(layer, x, use_reentrant=reentrant) if is_block else layer(x)
            return x

    reference = two_stages()
    for block in (reference[0][1], reference[1][0]):
        block.__class__ = Saving
    plain = copy.deepcopy(reference)
    for stage in reference:
        stage.__class__ = Outside
    backward_of(plain)

    def body() -> None:
        stages = [shard(stage) for stage in reference]
        schedule(*stages)
        pipeline = Pipeline(stages, own_tokens())
        with recorded() as names:
            pipeline.run(ONE_F_ONE_B)
        assert names.count(GATHER) == 3 + 2
        pipeline.finish()
        assert_same_gradients(stages, plain)

    run_threads(2, body)


def test_what_the_schedule_asks_for_is_all_that_is_sent() -> None:
    reference = two_stages()

    def body() -> None:
        stages = [shard(stage) for stage in reference]
        roots = [root for stage in stages for root in outermost(stage)]
        share_comm_ctx(roots)
        schedule(*stages)
        pipeline = Pipeline(stages, own_tokens())
        for text, num_gathers in ((ONE_F_ONE_B, 5), (ZERO_BUBBLE, 10)):
            seen = []
            for word in text.split():
                with recorded() as names:
                    pipeline.run(word)
                groups = 3 if word[0] == "0" else 2
                expected = {"UNSHARD": [GATHER] * groups, "REDUCE_GRAD": [SCATTER] * groups}
                assert names == expected.get(word[1:], []), word
                seen += names
            assert seen.count(GATHER) == num_gathers
            assert seen.count(SCATTER) == 5
            with recorded() as names:
                pipeline.finish()
            assert names == []

    run_threads(2, body)


def test_forwards_wait_for_their_own_modules() -> None:
    class Waited:
        def __init__(self) -> None:
            self.num = 0

        def enqueued(self, call: Call) -> None:
            """Only the end is counted."""

        def completed(self, call: Call, error: Exception | None) -> None:
            self.num += 1

    reference = two_stages()

    def body() -> None:
        stage = shard(reference[0])
        schedule(stage)
        waited, seen = Waited(), []
        for block in (stage[1], stage[2]):
            block.up.register_forward_pre_hook(lambda *_: seen.append(waited.num))
        disttrain.current_world().add_observer(waited)
        stage.unshard_all()
        seen.append(waited.num)
        stage(own_tokens())
        disttrain.current_world().remove_observer(waited)
        assert seen == [0, 2, 3]

    run_threads(2, body)


def whole_bytes(module: nn.Module) -> int:
    """What the gathered parameters have in memory."""
    storages = {
        param.unsharded.untyped_storage()
        for part in module.modules()
        if (state := state_of(part)) is not None
        for group in state.groups
        for param in group.params
        if param.unsharded is not None
    }
    return sum(storage.nbytes() for storage in storages)


def test_nothing_whole_remains_of_a_stage_that_is_freed() -> None:
    reference = two_stages()

    def body() -> None:
        stages = [shard(stage) for stage in reference]
        schedule(*stages)
        pipeline = Pipeline(stages, own_tokens())
        unsharded = set()
        for word in ZERO_BUBBLE.split():
            pipeline.run(word)
            unsharded |= {word[0]} if word.endswith("UNSHARD") else set()
            unsharded -= {word[0]} if word.endswith("RESHARD") else set()
            for number, stage in enumerate(stages):
                if str(number) not in unsharded:
                    assert whole_bytes(stage) == 0
                elif word.endswith("F3"):
                    assert whole_bytes(stage) > sum(p.numel() * 8 for p in reference[number].parameters())
        assert whole_bytes(nn.ModuleList(stages)) == 0
        # Nor do gradients of parameter parameters.
        unsharded = [param.unsharded for stage in stages for group in groups_of(stage) for param in group.params]
        assert [parameter.grad for parameter in unsharded] == [None] * len(unsharded)

    run_threads(2, body)


def groups_of(stage: nn.Module) -> list:
    states = [state for part in stage.modules() if (state := state_of(part)) is not None]
    return [group for state in states for group in state.groups]


@pytest.mark.parametrize("reduce_dtype", [torch.float32, None, torch.bfloat16], ids=str)
def test_sums_are_kept_in_the_dtype_of_their_reduction(reduce_dtype: torch.dtype | None) -> None:
    torch.manual_seed(5)
    layer = nn.Linear(4, 4)
    microbatches = [torch.randn(3, 4) for _ in range(16)]

    def gradient(given: torch.Tensor) -> torch.Tensor:
        """Of the weight for one microbatch, in bfloat16."""
        return (torch.ones(3, 4, dtype=torch.bfloat16).T @ given.bfloat16()).detach()

    is_wide = reduce_dtype == torch.float32
    grads = [gradient(given) for given in microbatches]
    sums = torch.zeros(4, 4) if is_wide else torch.zeros(4, 4).bfloat16()
    for grad in grads:
        sums = sums + grad
    copies: list[int] = []

    def body() -> None:
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)
        model = fully_shard(copy.deepcopy(layer), mp_policy=policy)
        model.set_is_scheduled(True)
        model.unshard_all()
        for given in microbatches:
            output = model(given)
            assert output.dtype == torch.bfloat16
            output.sum().backward()
            weight = model.weight
            assert (weight.grad is None) == is_wide
            copies.append(sum(param._earlier_grad is not None for param in groups_of(model)[0].params))
            model.reshard_all()
            model.unshard_all()
        model.reshard_all()
        model.reduce_grads(0.5)
        model.finish_grads()
        assert torch.equal(model.weight.grad.full_tensor(), (sums.float() / 2))

    run_threads(2, body)
    assert set(copies) == ({2} if is_wide else {0})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("kind", ["mean", "sums alone", "factor"])
def test_the_scale_goes_with_any_division(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def body() -> None:
        model = nn.Linear(1, 4, bias=False).to(dtype)
        fully_shard(model, mesh=disttrain.init_device_mesh("cpu", shape))
        model.set_force_sum_reduction_for_comms(kind == "sums alone")
        if kind == "factor":
            model.set_gradient_divide_factor(2.0)
        model.set_is_scheduled(True)
        for step in range(2):
            model.set_requires_all_reduce(step == 1)
            model.unshard_all()
            for _ in range(3):
                model(torch.full((1, 1), disttrain.get_rank() + 1.0, dtype=dtype)).sum().backward()
            model.reshard_all()
            model.reduce_grads(0.25)
            model.finish_grads()
        # Ranks' inputs add up to 10, in three microbatches of two steps.
        expected = 10 * 6 * 0.25 / (2 if kind == "factor" else 4)
        assert model.weight.grad.full_tensor().flatten().tolist() == [expected] * 4

    run_threads(4, body)


def test_a_sharded_module_refuses_to_compute() -> None:
    def body() -> None:
        model = fully_shard(nn.Linear(2, 2))
        with pytest.raises(ShardingError, match="no schedule decides"):
            model.unshard_all()
        model.set_is_scheduled(True)
        with pytest.raises(ShardingError, match="forward: FSDPLinear, which has parameter weight, is sharded"):
            model(torch.ones(1, 2))
        model.unshard_all()
        output = model(torch.ones(1, 2))
        model.reshard_all()
        with pytest.raises(ShardingError, match="backward: FSDPLinear"):
            output.sum().backward()
        model.unshard_all()
        output = model(torch.ones(1, 2))
        output.sum().backward()
        model.set_is_scheduled(False)
        assert model(torch.ones(1, 2)).shape == (1, 2)

    run_threads(2, body)


def test_a_step_that_fails_leaves_nothing_behind() -> None:
    reference = two_stages()
    whole = copy.deepcopy(reference)
    backward_of(whole)

    def body() -> None:
        stages = [shard(stage) for stage in reference]
        schedule(*stages)
        words = ZERO_BUBBLE.split()
        for num_actions in (9, len(words) - 3, len(words)):
            Pipeline(stages, own_tokens()).run(" ".join(words[:num_actions]))
            for stage in stages:
                stage.reset_iter_state()
            assert whole_bytes(nn.ModuleList(stages)) == 0
        pipeline = Pipeline(stages, own_tokens())
        pipeline.run(ZERO_BUBBLE)
        pipeline.finish()
        assert_same_gradients(stages, whole)
        # Clearing gradients clears those on their way to one stage alone.
        pipeline.run(ONE_F_ONE_B)
        stages[0].zero_grad()
        pipeline.finish()
        assert all(parameter.grad is None for parameter in stages[0].parameters())

    run_threads(2, body)


def test_a_copy_is_not_scheduled() -> None:
    def body() -> None:
        model = fully_shard(nn.Linear(2, 2), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        model.set_is_scheduled(True)
        model.unshard_all()
        other = copy.deepcopy(model)
        assert other(torch.ones(1, 2)).dtype == torch.bfloat16
        other(torch.ones(1, 2)).sum().backward()
        assert other.weight.grad.dtype == torch.float32
        assert model.weight.grad is None

    run_threads(2, body)


def test_streams_may_be_shared_at_any_time() -> None:
    def body() -> None:
        stages = [fully_shard(nn.Linear(2, 2)) for _ in range(3)]
        stages[0](torch.ones(1, 2)).sum().backward()
        schedule(*stages)
        for stage in stages[:2]:
            stage.unshard_all()
            stage(torch.ones(1, 2)).sum().backward()
            stage.reduce_grads()
            stage.reshard_all()
        grads = [stage.weight.grad.to_local().clone() for stage in stages[:1]]
        share_comm_ctx(stages[:2])
        stages[1].share_comm_with(stages[2:])
        assert {group.comm for stage in stages for group in groups_of(stage)} == {state_of(stages[0]).comm}
        stages[2].finish_grads()
        assert torch.equal(stages[0].weight.grad.to_local(), 2 * grads[0])
        assert stages[1].weight.grad.full_tensor().flatten().tolist() == [1.0] * 4

    run_threads(2, body)
