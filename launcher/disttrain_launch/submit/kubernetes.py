"""A manifest for Kubernetes: a headless Service and an Indexed Job, with one pod for each node.

Pods of an Indexed Job are called JOB-0, JOB-1, ...; the Service gives them addresses JOB-0.JOB (Kubernetes'
documentation, "Indexed Job for Parallel Processing" and "Job with Pod-to-Pod Communication"). The manifest names the
Secret of the job's token and doesn't hold it.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import signal
from collections.abc import Mapping
from typing import Any

from disttrain.errors import LaunchError
from disttrain.reports import REQUEUE_EXIT_CODE
from disttrain_launch.submit.request import Submission

_END_S = 15
"""The time that a launcher may take to end beyond that of its workers."""
MAX_NAME = 63
"""Characters of a pod's host name, by RFC 1123."""
_CONTAINER = "launcher"
_LEFT = (REQUEUE_EXIT_CODE, 128 + signal.SIGTERM)
"""Exit codes of launchers that were told to go: workers have saved, or had not got so far that they could."""
_TOKEN_FOLDER = "/run/disttrain"
# What the launcher takes on standard input it may read whatever user the image runs as.
_WITH_TOKEN = f'exec "$@" < {_TOKEN_FOLDER}/token'
Json = dict[str, Any]


def secret_name(name: str) -> str:
    return f"{name}-token"


def manifest(job: Submission, args: argparse.Namespace, variables: Mapping[str, str]) -> Json:
    """Service and Job as a List. Raises LaunchError."""
    name = job_name(job)
    metadata: Json = {"name": name, "labels": {"app.kubernetes.io/managed-by": "disttrain-launch"}}
    if args.namespace is not None:
        metadata["namespace"] = args.namespace
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        # The Job labels its pods; launchers look for node 0 before anybody calls its pod ready.
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": name}},
    }
    launcher_left = {"containerName": _CONTAINER, "operator": "In", "values": list(_LEFT)}
    spec: Json = {
        # Pods that are told to go come again, and don't count as failed; the others of the job have left with them.
        "podFailurePolicy": {
            "rules": [
                # Kubernetes 1.26 asks for both in each rule.
                {"action": "Ignore", "onExitCodes": launcher_left, "onPodConditions": []},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "completionMode": "Indexed",
        "completions": job.most_nodes,
        "parallelism": job.most_nodes,
        "template": {"spec": _pod(job, args, name, variables)},
    }
    if not job.is_elastic:
        spec["backoffLimit"] = 0  # One pod alone cannot join again.
    return {
        "apiVersion": "v1",
        "kind": "List",
        "items": [service, {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}],
    }


def secret(name: str, token: str, owner: Json) -> Json:
    """The token's Secret, which goes when its `owner`, the Job, goes."""
    reference = {"apiVersion": "batch/v1", "kind": "Job", "name": owner["name"], "uid": owner["uid"]}
    metadata = {"name": secret_name(name), "ownerReferences": [reference]}
    if "namespace" in owner:
        metadata["namespace"] = owner["namespace"]
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"token": token}}


def job_metadata(made: str) -> Json:
    """Of the Job among the objects that kubectl has made and prints, one JSON document after the other."""
    decoder, at = json.JSONDecoder(), 0
    while True:
        document, at = decoder.raw_decode(made, len(made) - len(made[at:].lstrip()))
        if document["kind"] == "Job":
            return dict(document["metadata"])


def job_name(job: Submission) -> str:
    """The job's name as a host name. Raises LaunchError when it cannot be one."""
    name = re.sub(r"[^a-z0-9-]", "-", job.name.lower()).strip("-")
    longest = f"{name}-{job.most_nodes - 1}"
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name) or len(longest) > MAX_NAME:
        raise LaunchError(
            job.operation,
            f"--job-name {job.name}: pods could not be called {longest}.",
            f"Give letters, digits and hyphens, a letter first, {MAX_NAME} at most with the number.",
        )
    return name


def _pod(job: Submission, args: argparse.Namespace, name: str, variables: Mapping[str, str]) -> Json:
    if args.image is None:
        raise LaunchError(job.operation, "no image was given.", "Give --image with disttrain and the script in it.")
    if job.has_token:
        raise LaunchError(
            job.operation, "--token-file is a file of this machine.", "Drop it: a Secret holds the token."
        )
    resources: Json = {}
    wanted = (("nvidia.com/gpu", args.gpus_per_node), ("cpu", args.cpus_per_task), ("memory", args.mem))
    for resource, amount in wanted:
        if amount is not None:
            resources[resource] = str(amount)
    container = {
        "name": _CONTAINER,
        "image": args.image,
        "command": ["sh", "-c", _WITH_TOKEN, "sh"],
        # Kubernetes puts a variable's value for $(NAME), unless the dollar is doubled.
        "args": [each.replace("$", "$$") for each in job.run_command("--token-file=-")],
        "env": [
            {"name": variable, "value": value.replace("$", "$$")}
            for variable, value in {**_job_variables(job, args, name), **variables}.items()
        ],
        "resources": {"limits": resources},
        "volumeMounts": [
            {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108
            {"name": "token", "mountPath": _TOKEN_FOLDER, "readOnly": True},
        ],
    }
    if args.workdir is not None:
        container["workingDir"] = args.workdir
    return {
        "restartPolicy": "Never",
        # The launcher is told to end first; its workers may still save.
        "terminationGracePeriodSeconds": math.ceil(args.shutdown_timeout) + _END_S,
        "subdomain": name,
        "containers": [container],
        "volumes": [
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
            {"name": "token", "secret": {"secretName": secret_name(name)}},
        ],
    }


def _job_variables(job: Submission, args: argparse.Namespace, name: str) -> dict[str, str]:
    where = (
        {} if args.given & {"master_addr", "rdzv_endpoint"} else {"DISTTRAIN_LAUNCH_MASTER_ADDR": f"{name}-0.{name}"}
    )
    return {"DISTTRAIN_LAUNCH_NNODES": job.nnodes, "DISTTRAIN_LAUNCH_RDZV_ID": name, **where}
