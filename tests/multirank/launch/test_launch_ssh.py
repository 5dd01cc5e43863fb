"""`submit ssh` through a real sshd, started for each connection and gone with it; only its host names are made up."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.surroundings.programs import needs_root, program

if TYPE_CHECKING:
    from tests.multirank.launch.conftest import Ended, Launches

SSHD_CONFIG = """\
HostKey {folder}/host-key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
PidFile none
"""
# sshd wants a folder below /run, which an installation that never started it doesn't have.
SSHD = "mount -t tmpfs none /run && mkdir /run/sshd && exec {sshd} -i -f {folder}/sshd_config"
SSH_CONFIG = """\
Host unreachable
    ProxyCommand false
Host *
    ProxyCommand unshare --mount sh {folder}/sshd.sh
    IdentityFile {folder}/key
    IdentitiesOnly yes
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
"""
HOSTS = ("root@localhost", "127.0.0.1")
CHOSEN = """it's "q" $HOME ü"""
WORKER = """
    import os, sys
    from disttrain.store import TCPStore
    host, port = os.environ["DISTTRAIN_STORE"].rsplit(":", 1)
    store = TCPStore(host, int(port), timeout=120)
    store.barrier("all here", int(os.environ["WORLD_SIZE"]))
    store.close()
    print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.environ["CHOSEN"], sys.argv[1:])
"""


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The value of --ssh."""
    sshd, keygen = program("sshd", "openssh-server"), program("ssh-keygen", "openssh-client")
    needs_root("run an sshd beside the system's")
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("key", "host-key"):
        subprocess.run([keygen, "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    for name, text in (("sshd_config", SSHD_CONFIG), ("sshd.sh", SSHD), ("ssh_config", SSH_CONFIG)):
        (folder / name).write_text(text.format(folder=folder, sshd=sshd))
    return f"ssh -F {folder}/ssh_config"


def variables(launches: Launches) -> list[str]:
    """What sshd starts has an environment of its own: the mark by which processes are found goes along."""
    names = [name for name, value in launches.environ().items() if value == launches.mark]
    return ["--env", f"CHOSEN={CHOSEN}", "--env", "TMPDIR", *[f"--env={name}" for name in names]]


def start(launches: Launches, ssh: str, hosts: tuple[str, ...], *argv: str) -> subprocess.Popen[str]:
    return launches.start("submit", "ssh", "--ssh", ssh, "--hosts", ",".join(hosts), *variables(launches), *argv)


def run(launches: Launches, ssh: str, hosts: tuple[str, ...], *argv: str) -> Ended:
    return launches.end(start(launches, ssh, hosts, *argv))


def test_a_launcher_runs_on_each_host_where_we_are(launches: Launches, ssh: str) -> None:
    launches.folder = launches.folder / """it's a "folder" of $HOME, ü"""
    launches.folder.mkdir()
    odd = ["--x", """it's "q" $HOME `id` ü""", "", "two\nlines"]
    ended = run(launches, ssh, HOSTS, "--nproc-per-node", "2", launches.script(WORKER, "it's mine.py"), *odd)
    assert sorted(ended.lines) == [f"[rank {rank}] rank {rank} of 4 {CHOSEN} {odd}" for rank in range(4)], ended.stderr
    assert (ended.exit_code, ended.stderr) == (0, "")


def test_one_host_is_a_job_too(launches: Launches, ssh: str) -> None:
    (launches.folder / "hosts").write_text("# ours\n127.0.0.1  # the only one\n\n")
    script = launches.script(WORKER)
    ended = launches.run("submit", "ssh", "--ssh", ssh, "--host-file", "hosts", *variables(launches), script)
    assert ended.lines == [f"[rank 0] rank 0 of 1 {CHOSEN} []"], ended.stderr


def test_the_host_that_failed_first_is_named(launches: Launches, ssh: str) -> None:
    script = launches.script("""
        import os, sys, time
        if os.environ["RANK"] == "1":
            sys.exit(7)
        time.sleep(100)
    """)
    ended = run(launches, ssh, HOSTS, script)
    assert ended.exit_code == 7
    assert ended.stderr.splitlines()[-1] == "disttrain-launch: host 127.0.0.1 (node 1) failed first: exit code 7"
    assert "disttrain-launch: rank 1 failed first: exit code 7 after" in ended.stderr


def test_a_host_that_is_not_reached_ends_the_others(launches: Launches, ssh: str) -> None:
    began_s = time.monotonic()
    ended = run(launches, ssh, ("127.0.0.1", "unreachable"), launches.script(WORKER))
    assert ended.exit_code == 255
    last = "disttrain-launch: host unreachable (node 1) failed first: ssh ended with 255: not reached, or lost"
    assert ended.stderr.splitlines()[-1] == last
    assert time.monotonic() - began_s < 80


def test_an_interrupt_reaches_the_workers(launches: Launches, ssh: str) -> None:
    script = launches.script("""
        import signal, sys, time
        signal.signal(signal.SIGINT, lambda *_: (print("saved", flush=True), sys.exit(0)))
        print("ready", flush=True)
        time.sleep(100)
    """)
    started = start(launches, ssh, HOSTS, script)
    assert sorted(launches.ready(started, 2)) == ["[rank 0] ready\n", "[rank 1] ready\n"]
    started.send_signal(signal.SIGINT)
    ended = launches.end(started)
    assert sorted(ended.lines) == ["[rank 0] saved", "[rank 1] saved"]
    assert ended.exit_code == 128 + signal.SIGINT
    assert ended.stderr.splitlines()[-1].startswith("disttrain-launch: stopped by SIGINT on node ")


def test_nothing_is_left_where_nobody_can_say_goodbye(launches: Launches, ssh: str) -> None:
    started = start(launches, ssh, HOSTS, launches.script("import time\nprint('ready', flush=True)\ntime.sleep(100)"))
    launches.ready(started, 2)
    started.kill()
    assert launches.wait_gone(80.0) == []


def test_the_token_is_in_no_argument_and_no_variable(launches: Launches, ssh: str) -> None:
    script = launches.script("""
        import os, stat, time
        path = os.environ["DISTTRAIN_TOKEN_FILE"]
        print(open(path).read().strip(), oct(stat.S_IMODE(os.stat(path).st_mode)), path, flush=True)
        time.sleep(100)
    """)
    started = start(launches, ssh, HOSTS, script)
    said = [line.split()[2:] for line in launches.ready(started, 2)]
    assert {(token, mode) for token, mode, _ in said} == {(said[0][0], "0o600")}
    assert [process for process in psutil.process_iter() if said[0][0] in _seen(process)] == []
    started.send_signal(signal.SIGTERM)
    assert launches.end(started).exit_code == 128 + signal.SIGTERM
    assert [path for *_, path in said if Path(path).exists()] == []


def _seen(process: psutil.Process) -> str:
    """What others may see of a process."""
    try:
        return f"{process.cmdline()} {process.environ()}"
    except psutil.Error:
        return ""


def test_an_elastic_job_does_without_a_host(launches: Launches, ssh: str) -> None:
    conf = ("--nnodes", "1:2", "--rdzv-conf", "last_call_timeout=2")
    ended = run(launches, ssh, ("127.0.0.1", "unreachable"), *conf, launches.script(WORKER))
    assert (ended.exit_code, ended.lines) == (0, [f"[rank 0] rank 0 of 1 {CHOSEN} []"]), ended.stderr
