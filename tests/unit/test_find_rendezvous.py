"""Which rank this is, from arguments and environment."""

from __future__ import annotations

import pytest

from disttrain.errors import RendezvousError
from disttrain.process_group.joining.rendezvous import RendezvousInfo, find_rendezvous, join
from disttrain.store import HashStore

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


def test_from_the_environment() -> None:
    assert find_rendezvous(None, -1, -1, None, LAUNCHED) == RendezvousInfo(1, 4, "node0", 29500)
    assert find_rendezvous("env://", 0, -1, None, LAUNCHED).hosts_store


def test_a_running_store_is_joined() -> None:
    environ = {**LAUNCHED, "RANK": "0", "DISTTRAIN_STORE": "node0:4000"}
    assert find_rendezvous(None, -1, -1, None, environ) == RendezvousInfo(0, 4, "node0", 4000)


def test_under_torchrun_its_store_tells_where_ours_is() -> None:
    environ = {**LAUNCHED, "RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert find_rendezvous(None, -1, -1, None, environ) == RendezvousInfo(0, 4, "node0", 29500, under_torchrun=True)
    environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    assert find_rendezvous(None, -1, -1, None, environ) == RendezvousInfo(0, 4, "node0", 29500, hosts_store=True)


def test_a_running_store_comes_before_all_else_in_the_environment() -> None:
    environ = {**LAUNCHED, "TORCHELASTIC_USE_AGENT_STORE": "True", "DISTTRAIN_STORE": "[::1]:4000"}
    assert find_rendezvous(None, -1, -1, None, environ) == RendezvousInfo(1, 4, "::1", 4000)
    del environ["MASTER_ADDR"]
    assert find_rendezvous("env://", 3, -1, None, environ) == RendezvousInfo(3, 4, "::1", 4000)
    assert find_rendezvous("env://", 3, -1, None, {**environ, "DISTTRAIN_STORE": ""} | LAUNCHED).host == "node0"


def test_what_the_script_says_comes_before_the_environment() -> None:
    environ = {**LAUNCHED, "DISTTRAIN_STORE": "node0:4000"}
    assert find_rendezvous("tcp://h:1", 0, 3, None, environ) == RendezvousInfo(0, 3, "h", 1, hosts_store=True)
    assert find_rendezvous(None, 2, 3, HashStore(), environ) == RendezvousInfo(2, 3)
    assert find_rendezvous(None, 2, 3, None, environ) == RendezvousInfo(2, 3, "node0", 4000)


def test_an_address_of_ipv6_has_brackets_for_its_port_alone() -> None:
    environ = {**LAUNCHED, "DISTTRAIN_STORE": "[::1]:4000,[fe80::1]:5000"}
    place = find_rendezvous("env://", 2, 3, None, environ)
    assert (place.host, place.port, place.standby) == ("::1", 4000, ("fe80::1", 5000))


def test_from_an_address() -> None:
    assert find_rendezvous("tcp://h:1?rank=2&world_size=3", -1, -1, None, {}) == RendezvousInfo(2, 3, "h", 1)
    assert find_rendezvous("tcp://h:1", 0, 3, None, {}) == RendezvousInfo(0, 3, "h", 1, hosts_store=True)


@pytest.mark.parametrize("method", [None, "env://"])
@pytest.mark.parametrize(
    ("rank", "world_size", "environ"),
    [
        (-1, -1, {}),
        (0, 1, {}),
        (-1, -1, {"SLURM_STEP_ID": str(0xFFFFFFFB), "SLURM_STEP_NUM_TASKS": "4"}),
        (-1, -1, {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}),
        (0, 1, {"PMI_SIZE": "4"}),
    ],
    ids=["nothing", "said", "batch script", "one task", "said beside siblings"],
)
def test_who_is_launched_by_nobody_is_alone(
    method: str | None, rank: int, world_size: int, environ: dict[str, str]
) -> None:
    assert find_rendezvous(method, rank, world_size, None, environ) == RendezvousInfo(0, 1, is_alone=True)


def test_from_a_store() -> None:
    assert find_rendezvous(None, 2, 3, HashStore(), {}) == RendezvousInfo(2, 3)


@pytest.mark.parametrize(
    ("method", "rank", "world_size", "environ", "rule"),
    [
        (None, 1, -1, {}, "WORLD_SIZE and MASTER_ADDR and MASTER_PORT are not set. Start the script with disttrain-la"),
        (None, 0, 2, {}, "MASTER_ADDR and MASTER_PORT are not set"),
        (None, -1, -1, {"RANK": "0"}, "MASTER_PORT are not set, but RANK is.*For one process by itself, unset RANK"),
        ("env://", -1, -1, {"MASTER_ADDR": "node0"}, "RANK and WORLD_SIZE and MASTER_PORT are not set, but MASTER_AD"),
        (None, 0, 1, {"WORLD_SIZE": "1"}, "MASTER_PORT are not set, but WORLD_SIZE is"),
        (None, -1, -1, {"DISTTRAIN_STORE": "node0:4000"}, "RANK and WORLD_SIZE are not set"),
        (None, -1, -1, {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}, "one of 4 tasks of srun"),
        (None, -1, -1, {"OMPI_COMM_WORLD_SIZE": "2"}, "one of 2 processes of mpirun.*Start disttrain-launch in its"),
        (None, -1, -1, {**LAUNCHED, "RANK": "4"}, "rank 4 of world size 4"),
        (None, -1, -1, {**LAUNCHED, "DISTTRAIN_STORE": "nowhere"}, "is not host:port"),
        ("tcp://h", 0, 1, {}, "port number missing"),
        ("tcp://h:1", -1, 2, {}, "rank -1 of world size 2"),
        ("http://x", 0, 1, {}, "is unknown"),
        ("file://x", 0, 1, {}, "path missing"),
    ],
)
def test_what_cannot_be_is_refused(
    method: str | None, rank: int, world_size: int, environ: dict[str, str], rule: str
) -> None:
    with pytest.raises(RendezvousError, match=rule):
        find_rendezvous(method, rank, world_size, None, environ)


def test_both_store_and_method_are_refused() -> None:
    with pytest.raises(RendezvousError, match="Give one"):
        find_rendezvous("env://", 0, 1, HashStore())


def test_a_rank_that_never_comes_is_named() -> None:
    with pytest.raises(RendezvousError, match=r"ranks \[1, 2\] of 3 had not come"):
        join(HashStore(), RendezvousInfo(0, 3), timeout_s=0.05)


def test_a_contradiction_is_told_to_every_rank() -> None:
    store = HashStore()
    with pytest.raises(RendezvousError, match=r"ranks .* had not come"):
        join(store, RendezvousInfo(0, 2), timeout_s=0.01)
    with pytest.raises(RendezvousError, match="had not come"):
        join(store, RendezvousInfo(1, 3), timeout_s=5)

    store = HashStore()
    store.compare_set("join/terms", "", "something else")
    with pytest.raises(RendezvousError, match=r"rank 1 came with .*, others with something else.*\[rank 1\]"):
        join(store, RendezvousInfo(1, 3), timeout_s=5)
    with pytest.raises(RendezvousError, match="rank 1 came with"):
        join(store, RendezvousInfo(0, 3), timeout_s=5)


def test_a_rank_taken_twice() -> None:
    store = HashStore()
    store.add("join/rank/0", 1)
    with pytest.raises(RendezvousError, match="rank 0 was taken twice"):
        join(store, RendezvousInfo(0, 2), timeout_s=5)
