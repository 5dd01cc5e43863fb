"""What clusters are told of a job: every name and argument arrives as it was given, and what is wrong is refused."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain.errors import LaunchError
from disttrain_launch.output.failure.report import node_that_failed
from disttrain_launch.request.handed_token import read_handed_token
from disttrain_launch.submit.command import submit

ODD = ["--x", """it's "q" $HOME `id` $(HOME) \\ ü""", "", "--", "-y"]
LAUNCHER = (sys.executable, "-m", "disttrain_launch")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *argv: str, **environ: str) -> str:
    assert submit(argv, environ) == 0
    return capsys.readouterr().out


def test_a_batch_script(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    flags = "--nnodes 4 --nproc-per-node 8 --gpus-per-node 8 --cpus-per-task 64 --mem 500G --time 1-00:00:00"
    more = "--partition gpu --account us --job-name big --output %x-%j.out --requeue --save-time 120 --sbatch qos=high"
    python = "--python /venv/bin/python --sbatch exclusive --log-dir logs"
    text = shown(capsys, "slurm", *flags.split(), *more.split(), *python.split(), "train.py", "--steps", "3")
    assert (
        text
        == f"""\
#!/bin/bash
#SBATCH --job-name=big
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=500G
#SBATCH --time=1-00:00:00
#SBATCH --partition=gpu
#SBATCH --account=us
#SBATCH --output=%x-%j.out
#SBATCH --chdir={folder}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120
#SBATCH --qos=high
#SBATCH --exclusive

set -euo pipefail
status=0
# The job's token goes to every launcher through srun's standard input: it is no argument, no variable, no shared file.
/venv/bin/python -m disttrain_launch --new-token - |
    srun --ntasks-per-node=1 --cpus-per-task=64 --wait=60 /venv/bin/python -m disttrain_launch run \
--token-file=- --shutdown-timeout=120 --nproc-per-node=8 --log-dir=logs train.py --steps 3 || status=$?
# 75: it was told to go, has saved, and is to be started again. But not what somebody has cancelled.
if [ "$status" = 75 ] && [ "$(squeue --noheader --format=%T --jobs="$SLURM_JOB_ID")" = RUNNING ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""
    )


def _run_batch(folder: Path, launcher_exit_code: int, state: str) -> tuple[int, str]:
    """Runs what `submit slurm --requeue` writes, with Slurm's programs as they answer for a job in this state.

    Returns: its exit code, and what scontrol was asked.
    """
    for name, text in {
        "srun": f"cat > token; exit {launcher_exit_code}",
        "squeue": f"echo {state}",
        "scontrol": f'echo "$@" >> {folder}/asked',
    }.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    environ = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "4711"}
    environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(["bash", "job.sh"], cwd=folder, env=environ, timeout=240, check=False)
    asked = folder / "asked"
    return done.returncode, asked.read_text() if asked.exists() else ""


@pytest.mark.parametrize(
    ("launcher_exit_code", "state", "asked"),
    [(75, "RUNNING", "requeue 4711\n"), (75, "COMPLETING", ""), (1, "RUNNING", ""), (0, "RUNNING", "")],
)
def test_a_job_that_has_saved_is_requeued_unless_it_was_cancelled(
    capsys: pytest.CaptureFixture[str], folder: Path, launcher_exit_code: int, state: str, asked: str
) -> None:
    shown(capsys, "slurm", "--requeue", "--write", "job.sh", "train.py")
    assert "#SBATCH --signal=USR1@120\n" in Path("job.sh").read_text()
    assert _run_batch(folder, launcher_exit_code, state) == (launcher_exit_code, asked)


def test_a_range_of_nodes_outlives_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "slurm", "--nnodes", "2:4", "--token-file", "/shared/token", "train.py")
    assert "#SBATCH --nodes=2-4\n" in text
    assert "#SBATCH --no-kill\n" in text
    last = text.splitlines()[-1]
    assert last.startswith("srun --ntasks-per-node=1 --no-kill --wait=0 ")
    assert last.endswith(" run --nnodes=2:4 --token-file=/shared/token train.py")


def test_odd_arguments_survive_the_shell(capsys: pytest.CaptureFixture[str]) -> None:
    Path("it's mine.py").touch()
    text = shown(capsys, "slurm", "--role", "a b", "it's mine.py", *ODD)
    *_, command = text.split("|\n")
    assert shlex.split(command)[-7:] == ["--role=a b", "it's mine.py", *ODD]
    assert "#SBATCH --job-name=it-s-mine\n" in text


def test_variables_are_flags_here_too(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "slurm", "train.py", DISTTRAIN_LAUNCH_NNODES="3", DISTTRAIN_LAUNCH_OVERSUBSCRIBE="1")
    assert "#SBATCH --nodes=3\n" in text
    assert text.endswith(" run --token-file=- --oversubscribe train.py\n")


def manifest_of(
    capsys: pytest.CaptureFixture[str], *argv: str, **environ: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    listed = json.loads(shown(capsys, "kubernetes", "--image", "train:1", *argv, **environ))
    assert (listed["apiVersion"], listed["kind"]) == ("v1", "List")
    service, job = listed["items"]
    return service, job


def test_a_manifest(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--nnodes 4 --nproc-per-node 8 --gpus-per-node 8 --cpus-per-task 64 --mem 500Gi --namespace us --env HERE"
    service, job = manifest_of(
        capsys, *flags.split(), "--env", "A=$(B) c", "--workdir", "/src", "--job-name", "Big_run", "train.py", HERE="x"
    )
    metadata = {"name": "big-run", "namespace": "us", "labels": {"app.kubernetes.io/managed-by": "disttrain-launch"}}
    assert service == {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": "big-run"}},
    }
    assert job["metadata"] == metadata
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    assert spec["backoffLimit"] == 0
    pod = spec["template"]["spec"]
    assert (pod["subdomain"], pod["restartPolicy"]) == ("big-run", "Never")
    assert pod["terminationGracePeriodSeconds"] == 45
    (container,) = pod["containers"]
    assert shlex.join(container["args"]) == (
        "python -m disttrain_launch run --token-file=- --nproc-per-node=8 train.py"
    )
    assert {each["name"]: each["value"] for each in container["env"]} == {
        "DISTTRAIN_LAUNCH_NNODES": "4",
        "DISTTRAIN_LAUNCH_RDZV_ID": "big-run",
        "DISTTRAIN_LAUNCH_MASTER_ADDR": "big-run-0.big-run",
        "HERE": "x",
        "A": "$$(B) c",
    }
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "8", "cpu": "64", "memory": "500Gi"}}
    assert container["workingDir"] == "/src"
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    assert mounts == {"/dev/shm": "shared-memory", "/run/disttrain": "token"}  # noqa: S108  in the pod
    assert pod["volumes"] == [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        {"name": "token", "secret": {"secretName": "big-run-token"}},
    ]


def test_a_pod_s_command_gets_the_token_and_its_arguments(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """Run as Kubernetes would, with two dollars for one and the mounted folder elsewhere."""
    _, job = manifest_of(capsys, "--python", "./show", "train.py", *ODD)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (folder / "show").write_text(f"#!{sys.executable}\nimport sys, json\nprint(json.dumps([input(), *sys.argv[1:]]))\n")
    (folder / "show").chmod(0o755)
    (folder / "token").write_text("secret")
    command = [part.replace("/run/disttrain", str(folder)) for part in container["command"]]
    arguments = [part.replace("$$", "$") for part in container["args"]]
    said = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True).stdout
    assert json.loads(said) == ["secret", "-m", "disttrain_launch", "run", "--token-file=-", "train.py", *ODD]


def test_a_range_of_pods_may_fail_and_come_again(capsys: pytest.CaptureFixture[str]) -> None:
    _, job = manifest_of(capsys, "--nnodes", "2:4", "train.py")
    assert job["spec"]["completions"] == 4
    assert "backoffLimit" not in job["spec"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert {"name": "DISTTRAIN_LAUNCH_NNODES", "value": "2:4"} in container["env"]


@pytest.mark.parametrize("version", ["1.26", "1.31"])
@pytest.mark.parametrize("nnodes", ["2", "2:4"])
def test_the_manifest_fits_the_published_schemas(capsys: pytest.CaptureFixture[str], version: str, nnodes: str) -> None:
    flags = f"--nnodes {nnodes} --gpus-per-node 8 --cpus-per-task 4 --mem 5Gi --namespace us --workdir /w --env A=1"
    for item in manifest_of(capsys, *flags.split(), "train.py"):
        kubernetes_validate.validate(item, version, strict=True)


def fake(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of that name, which keeps what it is told."""
    (folder / name).write_text(f'#!/bin/sh\necho "$@" >> {folder}/told\ncat >> {folder}/told\n{text}\n')
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_now_sends_the_manifest_and_then_the_token(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [{"kind": "Service"}, {"kind": "Job", "metadata": {"name": "train", "uid": "u-1"}}]
    fake(folder, "kubectl", "\n".join(f"echo '{json.dumps(each, indent=4)}'" for each in made), monkeypatch)
    text = shown(capsys, "kubernetes", "--image", "i", "--now", "--write", "job.json", "train.py")
    assert text == "job train was created; see kubectl logs -f job/train\n"
    written = Path("job.json").read_text()
    first, second = Path("told").read_text().removeprefix("create -o json -f -\n").split("create -f -\n")
    assert first == written
    secret = json.loads(second)
    token = secret["stringData"]["token"]
    assert len(token) >= 32
    assert token not in written
    assert secret["metadata"]["name"] == "train-token"
    (owner,) = secret["metadata"]["ownerReferences"]
    assert owner == {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "u-1"}


def test_what_a_scheduler_refuses_is_handed_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(folder, "sbatch", "echo 'sbatch: error: invalid partition' >&2; exit 1", monkeypatch)
    with pytest.raises(LaunchError, match="sbatch refused with exit code 1: sbatch: error: invalid partition"):
        submit(["slurm", "--now", "train.py"], {})
    monkeypatch.setenv("PATH", str(folder / "empty"))
    with pytest.raises(LaunchError, match="sbatch cannot be run: No such file or directory"):
        submit(["slurm", "--now", "train.py"], {})


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("", "disttrain-launch submit: no cluster was named. Give slurm, kubernetes or ssh;"),
        ("pbs train.py", "disttrain-launch submit: pbs is no cluster."),
        ("slurm", "disttrain-launch submit slurm: no script was given."),
        ("slurm missing.py", "the script missing.py does not exist"),
        ("slurm --standalone --node-rank 1 train.py", "--node-rank, --standalone cannot be submitted."),
        ("slurm --nnodes 4:2 train.py", "--nnodes 4:2 is not a number of nodes."),
        ("slurm --nnodes x train.py", "--nnodes x is not a number of nodes."),
        ("slurm --nproc-per-node 0 train.py", "--nproc-per-node 0 starts nothing."),
        ("slurm --sbatch =x train.py", "--sbatch =x is not KEY=VALUE."),
        ("slurm --save-time 0 train.py", "--save-time 0: Slurm takes 1 to 65535 seconds."),
        ("slurm --write no/such train.py", "--write no/such cannot be written: No such file or directory."),
        ("kubernetes train.py", "no image was given."),
        ("kubernetes --image i --job-name 1x train.py", "--job-name 1x: pods could not be called 1x-0."),
        (f"kubernetes --image i --nnodes 12 --job-name {'a' * 61} train.py", "pods could not be called"),
        ("kubernetes --image i --token-file t train.py", "--token-file is a file of this machine."),
        ("kubernetes --image i --env 1A=2 train.py", "'1A' cannot be a variable's name"),
        ("kubernetes --image i --env UNSET train.py", "--env UNSET: it is not set here."),
        ("ssh train.py", "hosts are named by --hosts or by --host-file."),
        ("ssh --hosts a --host-file b train.py", "hosts are named by --hosts or by --host-file."),
        ("ssh --host-file missing train.py", "--host-file missing cannot be read"),
        ("ssh --hosts a,,b train.py", "'' is not a host."),
        ("ssh --hosts a,-oProxyCommand=x train.py", "'-oProxyCommand=x' is not a host."),
        ("ssh --hosts a,a train.py", "a, a: each node needs a host."),
        ("ssh --hosts a,b --nnodes 3 train.py", "--nnodes 3: 2 hosts are named."),
        ("ssh --hosts a --ssh no-such-program train.py", "no-such-program cannot be run: No such file or directory."),
    ],
)
def test_wrong_input_is_one_message(argv: str, words: str) -> None:
    with pytest.raises(LaunchError) as caught:
        submit(argv.split(), {})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_line_break_cannot_become_a_line_of_the_script() -> None:
    with pytest.raises(LaunchError, match="holds a line break"):
        submit(["slurm", "--partition", "a\n#SBATCH --wrap=x", "train.py"], {})


def test_the_help_names_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert "slurm|kubernetes|ssh" in shown(capsys, "--help")
    with pytest.raises(SystemExit) as caught:
        submit(["slurm", "--help"], {})
    assert caught.value.code == 0
    assert "usage: disttrain-launch submit slurm [flags]" in capsys.readouterr().out


@given(st.text(st.characters(codec="ascii", exclude_characters="\n"), min_size=1).filter(str.strip), st.text())
def test_only_the_token_s_line_is_read(token: str, rest: str) -> None:
    reader, writer = os.pipe()
    with open(reader, "rb") as file:
        os.write(writer, f"{token}\n{rest}".encode()[:60000])
        os.close(writer)
        assert read_handed_token(1.0, file.fileno()) == token.strip()
        assert io.BytesIO(file.read()).getvalue() == rest.encode()[: 60000 - len(token) - 1]


@pytest.mark.parametrize(
    ("given", "words"), [(b"", "its end came"), (b"\n", "an empty line came"), (None, "nothing within 0")]
)
def test_no_token_is_said(given: bytes | None, words: str) -> None:
    reader, writer = os.pipe()
    os.write(writer, given or b"")
    if given is not None:
        os.close(writer)
    with open(reader, "rb") as file, pytest.raises(LaunchError, match=words):
        read_handed_token(0.01, file.fileno())


def test_the_node_to_blame_is_read_from_an_ending() -> None:
    assert (
        node_that_failed("x\nrank 9 failed first: exit code 7 after 2.0 s [node 12, host h, local rank 1, pid 3]\n")
        == 12
    )
    assert node_that_failed("rank 9 ended: exit code 7\n") is None
