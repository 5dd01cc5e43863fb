"""What holds for all tests: bytecode, one thread each, hypothesis without a clock, and the mark of a GPU's tests."""

from __future__ import annotations

import gc
import logging
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from tests.forkserver.process import WRITERS, ForkServer
from tests.forkserver.server import GARBAGE_THRESHOLD, listening
from tests.surroundings.inductor_kernels import link_kernels, share_headers
from tests.surroundings.launching import FORK_CLIENT

if TYPE_CHECKING:
    from disttrain.testing import RankPool
    from tests.surroundings.authority import Authority

pytest_plugins = ["disttrain.testing.pytest_plugin", "tests.representatives", "tests.budget", "tests.threads"]

GPU_TESTS = Path(__file__).parent / "gpu"

NUM_FORK_SERVERS = {"launcher": 1, "torch": 2, "writer": 1}
"""By what they have loaded; those with torch have different hash seeds. xdist's workers have another."""
ADDRESSES: pytest.StashKey[dict[str, list[str]]] = pytest.StashKey()

# The suite starts a thousand interpreters. Where they may not write bytecode, as in many a container, each compiles
# disttrain anew, and pytest all tests: a tenth of the suite's time.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# What a shell without job control puts behind, or nohup starts, ignores these signals, and so does all that is started
# from there. What has a handler is not inherited.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, lambda *_: None)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# Every core has several tests and ranks: with a second thread each, they burn their time waiting for one another. It is
# read when torch is loaded, and inherited.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Of Inductor it is tested what it makes of our operators. Without vectors its C++ compiles in two thirds of the time,
# and it need not try out, in six seconds, what the processor and the compiler can do.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

# A kernel takes the compiler three seconds, of which one is left where the header of all kernels has been compiled. It
# has a name among the kernels' flags, by which they are kept: whoever has it must always have it.
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "1")

# Tests share their cores with ranks, so an example's time says nothing. A failure prints how to play it again.
hypothesis.settings.register_profile("disttrain", deadline=None, print_blob=True)
hypothesis.settings.load_profile("disttrain")


def pytest_xdist_auto_num_workers() -> int:
    """For `-n auto`: twice as many as there are cores. With half as many again, these idle a twelfth of the time."""
    return len(os.sched_getaffinity(0)) * 2


def addresses(config: pytest.Config) -> dict[str, list[str]]:
    """Those of this run's fork servers, by what they have loaded. They end with the run."""
    if ADDRESSES not in config.stash:
        stack = ExitStack()
        config.add_cleanup(stack.close)
        config.stash[ADDRESSES] = {
            kind: [stack.enter_context(listening(kind)) for _ in range(number)]
            for kind, number in NUM_FORK_SERVERS.items()
        }
    os.environ[WRITERS] = config.stash[ADDRESSES]["writer"][0]
    return config.stash[ADDRESSES]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """xdist's: its workers are forked by a server that has loaded all tests, in place of each loading them.

    Not where torch is for GPUs: tests ask for these as they are loaded, and then no fork can use them.
    """
    if not version("torch").endswith("+cpu"):
        return
    stack = ExitStack()
    config.add_cleanup(stack.close)
    address = stack.enter_context(listening("tests", *config.args))
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        for server in addresses(config)["torch"]:
            ForkServer(server).close()  # They load meanwhile.
    # Writers of saves, which pytest's own process starts as any other does, are not forked for it.
    client = shlex.join(["env", "-u", WRITERS, sys.executable, str(FORK_CLIENT), address])
    for spec in specs:
        if spec.popen and not spec.python:
            spec.python = client


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """xdist's: all its workers have the same, so that torch is loaded for none of them."""
    node.workerinput["fork_servers"] = addresses(node.config)


def pytest_configure(config: pytest.Config) -> None:
    if (shared := getattr(config, "workerinput", {}).get("fork_servers")) is not None:
        config.stash[ADDRESSES] = shared


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """What is loaded in it stays to the end: collections of garbage, which many tests ask for, need not look at it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(GARBAGE_THRESHOLD)
        gc.enable()


def pytest_collection_finish() -> None:
    if "torch" in sys.modules:
        from tests.forkserver.seeding import seed_no_gpus  # here, since it loads torch

        seed_no_gpus()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    import torch  # here, so that runs without a GPU test don't load it

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; torch sees none")


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """torch writes a trace of all that it compiles if anybody listens; pytest would, to be told in a failure."""
    trace = logging.getLogger("torch.__trace")
    for handler in tuple(trace.handlers):
        if type(handler).__module__.startswith("_pytest."):
            trace.removeHandler(handler)
    yield


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What jobs leave that fail on purpose goes with pytest's own folders, and so does what Inductor compiles.

    All workers of a run have one cache, and lock what they make in it. An earlier run's would hold graphs of operators
    that have changed since. Only what the compiler made of its C++ is kept, which is found by the text: three seconds
    of a core for each kernel.
    """
    own, base = tmp_path_factory.mktemp("t"), tmp_path_factory.getbasetemp()
    cache = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "inductor"
    cache.mkdir(exist_ok=True)
    kept = Path(tempfile.gettempdir(), f"disttrain-tests-{os.getuid()}")
    kept.mkdir(mode=0o700, exist_ok=True)
    is_ours = kept.stat().st_uid == os.getuid()
    if is_ours:
        link_kernels(kept, cache)
    share_headers(own)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
        patch.setenv("TMPDIR", str(own))
        patch.setattr(tempfile, "tempdir", str(own))
        yield
    if is_ours:
        link_kernels(cache, kept)


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The certificate authority of a job."""
    from tests.surroundings.authority import (
        Authority,  # here, since few tests need it and it loads a library of cryptography
    )

    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def fork_servers(pytestconfig: pytest.Config) -> list[str]:
    """The addresses of those with torch."""
    return addresses(pytestconfig)["torch"]


@pytest.fixture(scope="session")
def fork_server(fork_servers: list[str]) -> Iterator[ForkServer]:
    """One with torch, which forks scripts."""
    with closing(ForkServer(fork_servers[0])) as server:
        yield server


@pytest.fixture(scope="session")
def launcher_fork_server(pytestconfig: pytest.Config) -> Iterator[ForkServer]:
    """One with the launcher and without torch, which forks launchers."""
    with closing(ForkServer(addresses(pytestconfig)["launcher"][0])) as server:
        yield server


@pytest.fixture(scope="session")
def rank_pool(fork_servers: list[str]) -> Iterator[RankPool]:
    """The plugin's, with parents that need not load torch either."""
    from tests.forkserver.pool import forked_pool  # here, since it loads torch

    with forked_pool(fork_servers) as pool:
        yield pool


@pytest.fixture
def tls_settings(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every store of the test uses TLS, and its servers ask for the clients' certificates."""
    certificates = authority.issue()
    monkeypatch.setenv("DISTTRAIN_STORE_TLS_CA", certificates.ca_file)
    monkeypatch.setenv("DISTTRAIN_STORE_TLS_CERT", certificates.cert_file)
    monkeypatch.setenv("DISTTRAIN_STORE_TLS_KEY", certificates.key_file)
    monkeypatch.setenv("DISTTRAIN_STORE_TLS_ASK_CLIENTS", "1")
