"""Slurm: `srun` starts one launcher per node, and tells each of its step.

Variables: Slurm's manual page of srun, "OUTPUT ENVIRONMENT VARIABLES". A step's, not the job's: a job may have several
steps on some of its nodes each.
"""

from __future__ import annotations

from collections.abc import Mapping

from disttrain.errors import LaunchError
from disttrain_launch.clusters.host_lists import expand
from disttrain_launch.clusters.membership import Membership, number, port_of
from disttrain_launch.request.job import OPERATION

FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Batch scripts and interactive shells are steps too; slurm.h gives them the highest numbers."""
_ONE_EACH = f"Start it by srun --ntasks-per-node=1 {OPERATION} ...; --nproc-per-node says how many workers it starts."


def detect(environ: Mapping[str, str]) -> Membership | None:
    """This node's place in a step of srun. Raises LaunchError where a step doesn't start one launcher per node."""
    if not environ.get("SLURM_JOB_ID"):
        return None
    if not environ.get("SLURM_STEP_ID") or number(environ, "SLURM_STEP_ID") >= FIRST_SPECIAL_STEP:
        _check_alone(environ)
        return None
    name = f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
    num_nodes = number(environ, "SLURM_STEP_NUM_NODES")
    num_tasks = number(environ, "SLURM_STEP_NUM_TASKS")
    if num_tasks != num_nodes:
        raise LaunchError(
            OPERATION,
            f"Slurm step {name} starts {num_tasks} launchers on {num_nodes} node{'s' if num_nodes > 1 else ''}; "
            "one for each node is needed.",
            _ONE_EACH,
        )
    hosts_text = environ.get("SLURM_STEP_NODELIST", "")
    try:
        hosts = expand(hosts_text)
    except ValueError as error:
        problem = f"SLURM_STEP_NODELIST={hosts_text!r} is not a list of hosts: {error}."
        raise LaunchError(OPERATION, problem, "Give --nnodes, --node-rank and --master-addr.") from None
    return Membership(
        cluster=f"Slurm step {name}",
        node_rank=number(environ, "SLURM_NODEID"),
        num_nodes=num_nodes,
        master_addr=hosts[0],
        master_port=port_of(name),
        run_id=f"slurm-{name}",
    )


def _check_alone(environ: Mapping[str, str]) -> None:
    if environ.get("SLURM_JOB_NUM_NODES") and number(environ, "SLURM_JOB_NUM_NODES") > 1:
        raise LaunchError(
            OPERATION,
            f"Slurm job {environ['SLURM_JOB_ID']} has {environ['SLURM_JOB_NUM_NODES']} nodes, and this launcher was "
            "started on one of them alone.",
            f"{_ONE_EACH} For this node alone, give --standalone.",
        )
