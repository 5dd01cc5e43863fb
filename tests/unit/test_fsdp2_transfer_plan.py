"""In which form groups go over the wire, and how many modules' together: the rules, without tensors or ranks."""

from __future__ import annotations

import pytest

from disttrain.errors import ShardingError
from disttrain.fsdp2 import TransferCost, TransferPolicy
from disttrain.fsdp2.transfers.forms import COPY_BYTES_PER_S, TOGETHER_BYTES, plan_form, plan_together

MIB = 2**20
SLOW = TransferCost(2e-3, 3e9)
FAST = TransferCost(20e-6, 1e11)


def test_within_a_host_large_ones_are_in_place_and_small_ones_one_message() -> None:
    assert plan_form([4096, 64 * MIB], None, None) == (True, True)
    assert plan_form([4096, 8 * MIB], None, None) == (False, False)
    assert plan_form([4096], None, None) == (True,)


def test_between_hosts_all_but_the_largest_are_as_one_message() -> None:
    assert plan_form([4096, 64 * MIB], None, SLOW) == (False, False)
    large = int(2 * FAST.latency_s * COPY_BYTES_PER_S)
    assert plan_form([4096, large, large // 4], None, FAST) == (False, True, False)


def test_one_that_is_alone_needs_no_copy() -> None:
    assert plan_form([4096], None, SLOW) == (True,)


@pytest.mark.parametrize("cost", [None, SLOW, FAST])
def test_the_user_has_the_last_word(cost: TransferCost | None) -> None:
    assert plan_form([4096, 64 * MIB], "flat", cost) == (False, False)
    assert plan_form([4096, 64 * MIB], "in_place", cost) == (True, True)
    assert plan_together([MIB] * 7, 3, cost) == [2, 2, 3]
    assert plan_together([MIB] * 7, 1, cost) == [1] * 7
    assert plan_together([MIB] * 3, 9, cost) == [3]


def test_within_a_host_modules_go_by_themselves() -> None:
    assert plan_together([MIB] * 24, None, None) == [1] * 24


def test_the_slower_the_network_the_more_go_together() -> None:
    sets = [plan_together([6 * MIB] * 24, None, TransferCost(latency_s, 3e9)) for latency_s in (1e-6, 1e-3, 1e-2, 1.0)]
    assert all(sum(each) == 24 and max(each) - min(each) <= 1 for each in sets)
    assert len(sets[0]) == 24
    assert len(sets[0]) > len(sets[1]) > len(sets[2]) >= len(sets[3])


def test_two_sets_have_a_bound() -> None:
    sets = plan_together([TOGETHER_BYTES // 3] * 12, None, TransferCost(10.0, 3e9))
    assert max(sets) * TOGETHER_BYTES // 3 <= TOGETHER_BYTES
    assert plan_together([3 * TOGETHER_BYTES] * 4, None, TransferCost(10.0, 3e9)) == [1] * 4


def test_nothing_to_send_is_no_reason_to_wait() -> None:
    assert plan_together([0, 0, 0], None, SLOW) == [1, 1, 1]
    assert plan_together([], None, SLOW) == []


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ShardingError, match=r"there is no form 'round'. Give \"flat\", \"in_place\" or \"mixed\""):
        TransferPolicy("round")  # type: ignore[arg-type]
    with pytest.raises(ShardingError, match="together=0 is no number of modules"):
        TransferPolicy(together=0)
