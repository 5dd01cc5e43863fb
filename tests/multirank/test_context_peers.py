"""A ring whose keys are written to others' memory, by ranks that are threads: the values of one process; and what a
rank keeps."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import disttrain
from disttrain.kernels import Causal, attention
from disttrain.kernels.attention.context.operator import plan_of
from disttrain.kernels.attention.context.parts import Parts, by_document, contiguous, mirrored
from disttrain.kernels.attention.context.peers import PeerSlots
from disttrain.kernels.attention.context.planning import heads_cut
from disttrain.kernels.attention.runs import dense
from disttrain.mesh import DeviceMesh
from disttrain.process_group import ProcessGroup
from disttrain.testing import run_threads
from tests.cases.attention import rule_called
from tests.cases.kernels import drawn
from tests.cases.row_memory import Host, ThreadMemory

CPU = torch.device("cpu")
HEADS = 4, 2


def axis_by(host: Host) -> DeviceMesh:
    mesh = disttrain.init_device_mesh("cpu", (disttrain.get_world_size(),), mesh_dim_names=("cp",))
    group = mesh.get_group()
    group.peer_slots = PeerSlots(group, CPU, host.make)
    return mesh


def whole(length: int) -> list[torch.Tensor]:
    return [drawn(2, heads, length, 8, seed=seed).requires_grad_() for seed, heads in enumerate((4, 2, 2))]


def check(host: Host, cuts: list[Parts], names: list[str]) -> None:
    mesh = axis_by(host)
    rank = mesh.get_local_rank()
    for parts in cuts:
        for name in names:
            rule, tensors = rule_called(name, 2, HEADS[0], parts.length), whole(parts.length)
            expected = dense(*tensors, rule, None)
            weight = drawn(*expected.shape, seed=5)
            wanted = torch.autograd.grad(expected, tensors, weight)
            own = [parts.take(tensor.detach(), rank, 2).clone().requires_grad_() for tensor in tensors]
            plan = plan_of(*own, rule, parts)
            with disttrain.count_collectives() as there:
                result = attention(*own, rule, axis=mesh, parts=parts, way="ring")
            with disttrain.count_collectives() as back:
                grads = torch.autograd.grad(result, own, parts.take(weight, rank, 2))
            torch.testing.assert_close(result, parts.take(expected, rank, 2))
            for grad, wish in zip(grads, wanted, strict=True):
                torch.testing.assert_close(grad, parts.take(wish, rank, 2))
            assert (sent_bytes(there), sent_bytes(back)) == plan.sent_bytes(rank, "ring")


def sent_bytes(counted: Any) -> int:
    return sum(count.num_bytes for (_, name), count in counted.counts.items() if name == "send")


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("group_elements", [1, 1 << 25], ids=["heads in groups", "all heads"])
def test_values_and_bytes(num_ranks: int, group_elements: int) -> None:
    lengths = (1, num_ranks - 1, 13, 301)
    cuts = [cut(length, num_ranks) for length in lengths if length for cut in (contiguous, mirrored)]
    cuts.append(by_document([100, 201], num_ranks))
    with mock.patch.object(heads_cut, "_GROUP_ELEMENTS", group_elements):
        run_threads(num_ranks, check, Host(num_ranks), cuts, ["causal", "window", "alibi", "all"])


class NoMemory(Host):
    """Ranks that cannot reach each other."""

    def make(self, group: ProcessGroup, device: torch.device, num_bytes: int) -> ThreadMemory:
        self._num_made[group.group_rank] += 1
        assert self._num_made[group.group_rank] == 1, "it is asked for once"
        return None  # type: ignore[return-value]


def test_where_there_is_no_such_memory_keys_go_as_messages() -> None:
    run_threads(2, check, NoMemory(2), [mirrored(301, 2)], ["causal", "window"])


def test_one_run_ends_early() -> None:
    """As many exchanges as ranks less one are odd or even: the next run begins with the same slots."""

    def body(host: Host) -> None:
        mesh = axis_by(host)
        rank, parts, tensors = mesh.get_local_rank(), mirrored(90, disttrain.get_world_size()), whole(90)
        expected = parts.take(dense(*tensors, None, None), rank, 2)
        own = [parts.take(tensor, rank, 2) for tensor in tensors]
        for turn in range(30):
            # Some come late.
            torch.randn((turn * 7 + rank * 5) % 11 * 20000 + 1)
            torch.testing.assert_close(attention(*own, axis=mesh, parts=parts, way="ring"), expected)

    for num_ranks in (2, 3):
        run_threads(num_ranks, body, Host(num_ranks))


def kept_bytes(num_ranks: int, way: str | None) -> int:
    """Of what a rank of so many keeps of 60 positions of its own for backward."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        held.append(tensor)
        return tensor

    held: list[torch.Tensor] = []

    def body() -> None:
        axis = disttrain.init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("cp",))
        parts = mirrored(60 * num_ranks, num_ranks)
        weight = torch.ones(32, 32, requires_grad=True)
        leaves = [torch.randn(2, 60, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
        if axis.get_local_rank() > 0:
            attention(*(leaf.transpose(1, 2) for leaf in leaves), Causal(), axis=axis, parts=parts, way=way)
            return
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            own = [leaf.transpose(1, 2) for leaf in leaves]
            attended = attention(*own, Causal(), axis=axis, parts=parts, way=way)
            _ = attended.transpose(1, 2).flatten(-2) @ weight

    run_threads(num_ranks, body)
    return sum(kept.values())


def test_a_rank_keeps_what_it_would_of_a_shorter_sequence() -> None:
    alone = kept_bytes(1, None)
    for num_ranks in (2, 3):
        for way in ("ring", "gather"):
            assert kept_bytes(num_ranks, way) == alone
