"""Kubernetes: each pod of an Indexed Job, a JobSet or a PyTorchJob runs one launcher.

An Indexed Job gives its pods their index (Kubernetes' documentation, "Indexed Job for Parallel Processing"); how many
there are and where the first is must be said by DISTTRAIN_LAUNCH_NNODES and DISTTRAIN_LAUNCH_MASTER_ADDR, as
`disttrain-launch submit kubernetes` does, or in a JobSet by MASTER_ADDR. Kubeflow's PyTorchJob gives pods RANK and
WORLD_SIZE, which count pods where there is no PET_NNODES (training-operator, pkg/controller.v1/pytorch/envvar.go);
newer ones give PET_ variables, which are flags.
"""

from __future__ import annotations

from collections.abc import Mapping

from disttrain_launch.clusters.membership import Membership, number

_OWN_NAMES = ("localhost", "127.0.0.1")


def detect(environ: Mapping[str, str]) -> Membership | None:
    """This pod's place. Raises LaunchError."""
    if environ.get("JOB_COMPLETION_INDEX"):
        node_rank = number(environ, "JOB_COMPLETION_INDEX")
        return Membership("Kubernetes Job", node_rank, None, _master_addr(environ, node_rank), _master_port(environ))
    # With LOCAL_RANK these are another launcher's, which count workers.
    names = ("KUBERNETES_SERVICE_HOST", "RANK", "WORLD_SIZE", "MASTER_ADDR")
    if environ.get("LOCAL_RANK") or not all(environ.get(name) for name in names):
        return None
    node_rank = number(environ, "RANK")
    num_nodes = None if environ.get("PET_NNODES") else number(environ, "WORLD_SIZE")
    return Membership("PyTorchJob", node_rank, num_nodes, _master_addr(environ, node_rank), _master_port(environ))


def _master_addr(environ: Mapping[str, str], node_rank: int) -> str | None:
    addr = environ.get("MASTER_ADDR")
    # Early operators tell the first pod to listen where no other can reach it; its own name is its address.
    if addr in _OWN_NAMES and node_rank == 0:
        return environ.get("HOSTNAME") or addr
    return addr or None


def _master_port(environ: Mapping[str, str]) -> int | None:
    return number(environ, "MASTER_PORT") if environ.get("MASTER_PORT") else None
