"""MPI: `mpirun` starts one launcher per node; the ranks that it counts are launchers.

Variables: Open MPI's documentation, "Environment variables set for MPI applications"; for MPICH and Intel MPI what
their process manager Hydra sets. Open MPI up to 4 tells where mpirun itself runs, which is rank 0's node unless mpirun
was started on a node without ranks. Rank 0 sees that, for its daemon is another then: there its launcher asks for the
address, and mpirun ends the others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from disttrain.errors import LaunchError
from disttrain_launch.clusters.membership import Membership, number, port_of
from disttrain_launch.request.job import OPERATION


def detect(environ: Mapping[str, str]) -> Membership | None:
    """This node's place under a mpirun that says how many of its processes are on this node. Raises LaunchError."""
    if environ.get("OMPI_COMM_WORLD_SIZE"):
        _check_one_per_node("Open MPI", "--map-by ppr:1:node", environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
        job = environ.get("OMPI_MCA_ess_base_jobid") or environ.get("PMIX_NAMESPACE")
        return Membership(
            cluster="Open MPI",
            node_rank=number(environ, "OMPI_COMM_WORLD_RANK"),
            num_nodes=number(environ, "OMPI_COMM_WORLD_SIZE"),
            master_addr=_mpirun_addr(environ),
            master_port=port_of(job) if job else None,
            run_id=f"mpi-{job}" if job else None,
        )
    if environ.get("PMI_SIZE") and environ.get("MPI_LOCALNRANKS"):
        _check_one_per_node("MPI", "-ppn 1", environ, "MPI_LOCALNRANKS")
        return detect_bare(environ)
    return None


def detect_bare(environ: Mapping[str, str]) -> Membership | None:
    """This node's place by PMI's two variables alone. srun may set them too: ask for Slurm first."""
    if not environ.get("PMI_SIZE") or not environ.get("PMI_RANK"):
        return None
    return Membership("MPI", number(environ, "PMI_RANK"), number(environ, "PMI_SIZE"), master_addr=None)


def _check_one_per_node(name: str, flags: str, environ: Mapping[str, str], variable: str) -> None:
    if (num_local := number(environ, variable)) > 1:
        raise LaunchError(
            OPERATION,
            f"{name} starts {num_local} launchers on this node; one for each node is needed.",
            f"Start it by mpirun {flags} {OPERATION} ...; --nproc-per-node says how many workers it starts.",
        )


def _mpirun_addr(environ: Mapping[str, str]) -> str | None:
    """The host of `4711.0;tcp://10.0.0.1,172.17.0.1:39279;tcp6://...`, where that is rank 0's."""
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    if environ["OMPI_COMM_WORLD_RANK"] == "0" and environ.get("OMPI_MCA_orte_local_daemon_uri") != uri:
        return None
    match = re.search(r";tcp6?://(\[[^\]]+\]|[^,:;]+)", uri)
    return None if match is None else match[1].strip("[]")
