"""Clusters tell launchers their place: environment in, flags out; what was given wins, contradictions are refused."""

from __future__ import annotations

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain.errors import LaunchError
from disttrain_launch.clusters import Membership, find
from disttrain_launch.clusters.cluster_flags import placed
from disttrain_launch.clusters.host_lists import expand
from disttrain_launch.clusters.membership import FIRST_PORT, NUM_PORTS, port_of
from disttrain_launch.request.flags import parse

STEP = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_NODEID": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_MCA_ess_base_jobid": "4711",
    "OMPI_MCA_orte_hnp_uri": "4710.0;tcp://10.0.0.1,172.17.0.1:39279;tcp6://[fd00::2]:45467",
    "OMPI_MCA_orte_local_daemon_uri": "4710.1;tcp://10.0.0.2:39279",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "1"}
OLD_PYTORCH_JOB = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "RANK": "1",
    "WORLD_SIZE": "2",
}

LOCAL_FIRST = {**OLD_PYTORCH_JOB, "RANK": "0", "MASTER_ADDR": "localhost", "HOSTNAME": "pod"}


def args_of(*argv: str, **variables: str) -> argparse.Namespace:
    return parse([*argv, "train.py"], variables)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu1", "gpu1"),
        ("gpu[01-04,7],x3", "gpu01 gpu02 gpu03 gpu04 gpu7 x3"),
        ("a,b[2-3]-c,d", "a b2-c b3-c d"),
        ("r[1-2]n[8-10]", "r1n8 r1n9 r1n10 r2n8 r2n9 r2n10"),
        ("127.0.0.[1-2]", "127.0.0.1 127.0.0.2"),
        ("x[099-101]", "x099 x100 x101"),
    ],
)
def test_host_lists_are_expanded(text: str, hosts: str) -> None:
    assert expand(text) == tuple(hosts.split())


@pytest.mark.parametrize(
    "text", ["", ",", "a,", ",a", "a[", "a[]", "a[1-]", "a[2-1]", "a[x]", "a]b", "a[1-99999999999]"]
)
def test_what_is_no_host_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a name|is not a range|a name is missing|more than"):
        expand(text)


@given(st.lists(st.tuples(st.sampled_from(["n", "gpu-", "r1x"]), st.integers(0, 300), st.integers(0, 30)), min_size=1))
def test_ranges_are_their_members(items: list[tuple[str, int, int]]) -> None:
    short = ",".join(f"{name}[{first:03d}-{first + more:03d}]" for name, first, more in items)
    long = [f"{name}{number:03d}" for name, first, more in items for number in range(first, first + more + 1)]
    assert expand(short) == tuple(long) == expand(",".join(long))


def test_a_port_is_where_no_outgoing_connection_gets_one() -> None:
    ports = [port_of(f"{job}.0") for job in range(2000)]
    assert FIRST_PORT <= min(ports) <= max(ports) < FIRST_PORT + NUM_PORTS <= 32768
    assert len(set(ports)) > 1500


@pytest.mark.parametrize(
    ("environ", "membership"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "1"}, None),
        ({"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "4294967290", "SLURM_JOB_NUM_NODES": "1"}, None),
        (STEP, Membership("Slurm step 17.2", 1, 2, "gpu07", port_of("17.2"), "slurm-17.2")),
        (OPEN_MPI, Membership("Open MPI", 1, 3, "10.0.0.1", port_of("4711"), "mpi-4711")),
        ({**OPEN_MPI, **STEP}, Membership("Open MPI", 1, 3, "10.0.0.1", port_of("4711"), "mpi-4711")),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"}, Membership("Open MPI", 0, 3, None, port_of("4711"), "mpi-4711")),
        (
            {**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": "1.0;tcp6://[fd00::2]:4"},
            Membership("Open MPI", 1, 3, "fd00::2", port_of("4711"), "mpi-4711"),
        ),
        (HYDRA, Membership("MPI", 1, 2, None)),
        ({**HYDRA, **STEP}, Membership("MPI", 1, 2, None)),
        (
            {"PMI_RANK": "0", "PMI_SIZE": "2", **STEP},
            Membership("Slurm step 17.2", 1, 2, "gpu07", port_of("17.2"), "slurm-17.2"),
        ),
        ({"JOB_COMPLETION_INDEX": "3"}, Membership("Kubernetes Job", 3, None, None)),
        (
            {"JOB_COMPLETION_INDEX": "3", "MASTER_ADDR": "a", "MASTER_PORT": "5"},
            Membership("Kubernetes Job", 3, None, "a", 5),
        ),
        (OLD_PYTORCH_JOB, Membership("PyTorchJob", 1, 2, "job-master-0", 23456)),
        (LOCAL_FIRST, Membership("PyTorchJob", 0, 2, "pod", 23456)),
        (
            {**OLD_PYTORCH_JOB, "WORLD_SIZE": "16", "PET_NNODES": "2"},
            Membership("PyTorchJob", 1, None, "job-master-0", 23456),
        ),
        ({**OLD_PYTORCH_JOB, "LOCAL_RANK": "0"}, None),
        ({name: text for name, text in OLD_PYTORCH_JOB.items() if name != "KUBERNETES_SERVICE_HOST"}, None),
    ],
)
def test_what_an_environment_says(environ: dict[str, str], membership: Membership | None) -> None:
    assert find(environ) == membership


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (
            {**STEP, "SLURM_STEP_NUM_TASKS": "4"},
            "Slurm step 17.2 starts 4 launchers on 2 nodes; one for each node is needed. Start it by srun",
        ),
        (
            {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2"},
            "Slurm job 17 has 2 nodes, and this launcher was started on one of them alone.",
        ),
        ({**STEP, "SLURM_STEP_ID": "4294967290"}, "Slurm job 17 has 4 nodes"),
        ({**STEP, "SLURM_STEP_NODELIST": "a["}, "SLURM_STEP_NODELIST='a[' is not a list of hosts: '[' is not a name."),
        ({**STEP, "SLURM_NODEID": "x"}, "SLURM_NODEID='x' is not a number"),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            "Open MPI starts 2 launchers on this node; one for each node is needed. Start it by",
        ),
        ({**HYDRA, "MPI_LOCALNRANKS": "2"}, "one for each node is needed. Start it by mpirun -ppn 1"),
        ({**HYDRA}, "MPI does not say where node 0 is. Give --master-addr HOST, the same on all nodes."),
    ],
)
def test_what_cannot_be_a_job_is_refused(environ: dict[str, str], words: str) -> None:
    with pytest.raises(LaunchError) as caught:
        placed(args_of(), environ)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def filled(args: argparse.Namespace, environ: dict[str, str]) -> tuple[object, ...]:
    settled, _ = placed(args, environ)
    return (settled.nnodes, settled.node_rank, settled.master_addr, settled.master_port, settled.rdzv_id)


def test_without_flags_all_comes_from_the_cluster() -> None:
    assert filled(args_of(), STEP) == ("2", 1, "gpu07", port_of("17.2"), "slurm-17.2")


def test_node_0_says_what_was_found() -> None:
    where = f"gpu07:{port_of('17.2')}"
    assert placed(args_of(), {**STEP, "SLURM_NODEID": "0"})[1] == f"Slurm step 17.2: 2 nodes, which meet at {where}"
    assert placed(args_of(), STEP)[1] == ""


def test_flags_win() -> None:
    given = ("--master-addr", "x", "--rdzv-id", "mine")
    assert filled(args_of(*given), STEP) == ("2", 1, "x", port_of("17.2"), "mine")
    assert filled(args_of("--master-port", "1"), STEP)[2:4] == ("gpu07", 1)
    assert filled(args_of("--rdzv-endpoint", "x:1"), STEP)[:4] == ("2", 1, None, None)
    assert filled(args_of("--nnodes", "1:3"), STEP)[0] == "1:3"


@pytest.mark.parametrize(
    "argv",
    [
        "--standalone",
        "--nnodes 1",
        "--nnodes 1:1",
        "--nnodes 3 --node-rank 2 --master-addr x",
        "--nnodes 3 --node-rank 0 --rdzv-endpoint x:1",
    ],
)
def test_who_says_all_is_not_told_otherwise(argv: str) -> None:
    args = args_of(*argv.split())
    for environ in (STEP, {**STEP, "SLURM_STEP_NUM_TASKS": "16"}, HYDRA, OPEN_MPI, OLD_PYTORCH_JOB):
        assert placed(args, environ) == (args, "")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--nnodes 3", "--nnodes 3: Slurm step 17.2 has 2 nodes. Drop the flag;"),
        ("--nnodes 3:4", "--nnodes 3:4: Slurm step 17.2 has 2 nodes."),
        ("--node-rank 0", "--node-rank 0: in Slurm step 17.2 this is node 1."),
        ("--nnodes 3 --node-rank 0", "has 2 nodes. --node-rank 0: in Slurm step 17.2"),
    ],
)
def test_a_contradiction_is_one_message(argv: str, words: str) -> None:
    with pytest.raises(LaunchError) as caught:
        placed(args_of(*argv.split()), STEP)
    assert words in str(caught.value)


def test_a_step_of_one_node_is_a_node_alone() -> None:
    alone = {**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"}
    args = args_of()
    assert placed(args, alone) == (args, "")


def test_an_indexed_job_needs_to_know_how_many_it_is() -> None:
    index = {"JOB_COMPLETION_INDEX": "1"}
    args = args_of()
    assert placed(args, index) == (args, "")
    ours = args_of(
        DISTTRAIN_LAUNCH_NNODES="2", DISTTRAIN_LAUNCH_MASTER_ADDR="job-0.job", DISTTRAIN_LAUNCH_RDZV_ID="job"
    )
    assert filled(ours, index) == ("2", 1, "job-0.job", None, "job")
    job_set = {**index, "MASTER_ADDR": "set-0", "MASTER_PORT": "3389"}
    assert filled(args_of("--nnodes", "4"), job_set) == ("4", 1, "set-0", 3389, None)
    with pytest.raises(LaunchError, match="Kubernetes Job does not say where node 0 is"):
        placed(args_of("--nnodes", "4"), index)


def test_a_new_pytorch_job_is_all_flags() -> None:
    variables = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "m", "PET_MASTER_PORT": "23456"}
    args = args_of(**variables, PET_NPROC_PER_NODE="8")
    assert placed(args, {**OLD_PYTORCH_JOB, **variables, "WORLD_SIZE": "16"}) == (args, "")
    assert (args.nnodes, args.node_rank, args.master_addr, args.master_port) == ("2", 1, "m", 23456)
    assert args.nproc_per_node == "8"


def test_what_a_worker_starts_is_a_job_of_its_own() -> None:
    args = args_of()
    assert placed(args, {**STEP, "DISTTRAIN_AGENT": "agent"}) == (args, "")
    assert args_of(DISTTRAIN_LAUNCH_NNODES="2", DISTTRAIN_AGENT="agent").nnodes == "1"


def test_variables_are_flags_that_the_command_line_overrides() -> None:
    variables = {"PET_NNODES": "2", "DISTTRAIN_LAUNCH_NNODES": "3", "PET_ROLE": "theirs", "PET_OVERSUBSCRIBE": "1"}
    args = args_of(**variables)
    assert (args.nnodes, args.role, args.oversubscribe) == ("3", "theirs", True)
    assert args.given == {"nnodes", "role", "oversubscribe", "script"}
    assert args_of("--nnodes", "4", **variables).nnodes == "4"
    assert args_of(PET_NNODES="").nnodes == "1"
    assert args_of(PET_OVERSUBSCRIBE="0").oversubscribe is False


def test_what_says_the_same_comes_from_one_source() -> None:
    address = {"PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "1", "PET_NNODES": "2"}
    args = args_of("--rdzv-endpoint", "b:2", **address)
    assert (args.rdzv_endpoint, args.master_addr, args.master_port, args.nnodes) == ("b:2", None, None, "2")
    args = args_of("--standalone", **address)
    assert (args.standalone, args.master_addr, args.nnodes) == (True, None, "1")
    args = args_of(**address, PET_RDZV_ENDPOINT="c:3")
    assert (args.rdzv_endpoint, args.master_addr) == ("c:3", None)
    args = args_of("-m", DISTTRAIN_LAUNCH_NO_PYTHON="1")
    assert (args.module, args.no_python) == (True, False)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {"PET_NODE_RANK": "one"},
            "disttrain-launch: PET_NODE_RANK=one: argument --node-rank/--node_rank: invalid int",
        ),
        ({"DISTTRAIN_LAUNCH_STANDALONE": "yes"}, "DISTTRAIN_LAUNCH_STANDALONE=yes: it must be 0 or 1."),
        ({"PET_START_METHOD": "thread"}, "PET_START_METHOD=thread: torchrun's --start-method is not supported."),
        ({"PET_RDZV_BACKEND": "etcd"}, "PET_RDZV_BACKEND=etcd: argument --rdzv-backend"),
    ],
)
def test_a_wrong_variable_is_named(capsys: pytest.CaptureFixture[str], variables: dict[str, str], words: str) -> None:
    with pytest.raises(SystemExit) as caught:
        args_of(**variables)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
