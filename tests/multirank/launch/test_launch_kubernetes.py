"""Real kubectl, and the little of Kubernetes' API that it asks before it sends what `submit kubernetes` makes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from tests.surroundings.programs import program

if TYPE_CHECKING:
    from tests.multirank.launch.conftest import Launches

Json = dict[str, Any]


def _resources(version: str, **kinds: str) -> Json:
    listed = [{"name": name, "kind": kind, "namespaced": True, "verbs": ["create"]} for name, kind in kinds.items()]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": listed}


BATCH = {"groupVersion": "batch/v1", "version": "v1"}
ANSWERS: dict[str, Json] = {
    "/version": {"major": "1", "minor": "31"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "groups": [{"name": "batch", "versions": [BATCH], "preferredVersion": BATCH}]},
    "/api/v1": _resources("v1", services="Service", secrets="Secret"),
    "/apis/batch/v1": _resources("batch/v1", jobs="Job"),
}


class Api(BaseHTTPRequestHandler):
    """Answers what it knows, and keeps what it is sent."""

    sent: ClassVar[list[tuple[str, Json]]] = []

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self._answer(200 if path in ANSWERS else 404, ANSWERS.get(path, {"kind": "Status", "code": 404}))

    def do_POST(self) -> None:
        made = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.sent.append((self.path.partition("?")[0], made))
        metadata = {**made["metadata"], "uid": f"uid-of-{made['kind']}", "namespace": "ours"}
        self._answer(201, {**made, "metadata": metadata})

    def _answer(self, code: int, document: Json) -> None:
        text = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Nobody wants to read it."""


@pytest.fixture
def api(launches: Launches) -> Iterator[dict[str, str]]:
    """Variables that lead kubectl to our API. Schemas are what it doesn't have, so kubectl must not ask for them."""
    kubectl = program("kubectl", "kubernetes-client")
    wrapper = launches.folder / "kubectl"
    wrapper.write_text(f'#!/bin/sh\nexec {kubectl} "$@" --validate=false\n')
    wrapper.chmod(0o755)
    with HTTPServer(("127.0.0.1", 0), Api) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
            "contexts": [{"name": "test", "context": {"cluster": "test"}}],
        }
        (launches.folder / "config").write_text(json.dumps(config))
        yield {
            "KUBECONFIG": str(launches.folder / "config"),
            "HOME": str(launches.folder),
            "PATH": f"{launches.folder}:{launches.environ()['PATH']}",
        }
        server.shutdown()
        thread.join()
        Api.sent.clear()


def test_kubectl_takes_the_job_and_a_secret_that_goes_with_it(launches: Launches, api: dict[str, str]) -> None:
    flags = ("--nnodes", "2", "--image", "i", "--namespace", "ours", "--now")
    ended = launches.run("submit", "kubernetes", *flags, "train.py", "it's $HOME", **api)
    assert (ended.exit_code, ended.lines) == (0, ["job train was created; see kubectl logs -f job/train"]), ended.stderr
    (paths, (service, job, secret)) = zip(*Api.sent, strict=True)
    namespace = "/namespaces/ours/"
    assert paths == (
        f"/api/v1{namespace}services",
        f"/apis/batch/v1{namespace}jobs",
        f"/api/v1{namespace}secrets",
    )
    assert service["spec"]["selector"] == {"job-name": "train"}
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["args"][-2:] == ["train.py", "it's $$HOME"]
    (owner,) = secret["metadata"]["ownerReferences"]
    assert owner == {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "uid-of-Job"}
    assert {"name": "token", "secret": {"secretName": secret["metadata"]["name"]}} in pod["volumes"]
