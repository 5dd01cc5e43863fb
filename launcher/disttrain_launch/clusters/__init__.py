"""Reads from a cluster's environment how many nodes the job has, which one this is and where they meet.

membership     the value that comes of it
slurm, mpi, kubernetes, host_lists
               environment in, a Membership or None out; pure
cluster_flags  flags and Membership in, flags out: what was given wins, what contradicts is refused
"""

from __future__ import annotations

from collections.abc import Mapping

from disttrain_launch.clusters import kubernetes, mpi, slurm
from disttrain_launch.clusters.membership import Membership

__all__ = ["Membership", "find"]


def find(environ: Mapping[str, str]) -> Membership | None:
    """Asks the cluster that started this launcher about its node; None: no cluster did. Raises LaunchError.

    mpirun within a Slurm job starts its daemons by srun, so that Slurm's variables are there too, and count the
    daemons: MPI's are asked first.
    """
    for detect in (mpi.detect, slurm.detect, mpi.detect_bare, kubernetes.detect):
        if (membership := detect(environ)) is not None:
            return membership
    return None
