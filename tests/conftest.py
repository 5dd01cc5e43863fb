"""What holds for all tests: hypothesis without a clock, a folder for what they leave, and the mark of those on GPUs."""

from __future__ import annotations

import getpass
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from tests.authority import Authority

pytest_plugins = ["disttrain.testing.pytest_plugin"]

GPU_TESTS = Path(__file__).parent / "gpu"

# Tests share their cores with ranks, so an example's time says nothing. A failure prints how to play it again.
hypothesis.settings.register_profile("disttrain", deadline=None, print_blob=True)
hypothesis.settings.load_profile("disttrain")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    import torch  # here, so that runs without a GPU test don't load it

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; torch sees none")


@pytest.fixture(scope="session", autouse=True)
def own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests and their processes leave among temporary files, such as dumps of jobs, goes with pytest's own."""
    with pytest.MonkeyPatch.context() as patch:
        # What torch has compiled is of use to the next run as well.
        compiled = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(compiled)))
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("temporary")))
        patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The certificate authority of a job."""
    from tests.authority import Authority  # here, since few tests need it and it loads a library of cryptography

    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def tls_settings(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every store of the test uses TLS, and its servers ask for the clients' certificates."""
    certificates = authority.issue()
    monkeypatch.setenv("DISTTRAIN_STORE_TLS_CA", certificates.ca_file)
    monkeypatch.setenv("DISTTRAIN_STORE_TLS_CERT", certificates.cert_file)
    monkeypatch.setenv("DISTTRAIN_STORE_TLS_KEY", certificates.key_file)
    monkeypatch.setenv("DISTTRAIN_STORE_TLS_ASK_CLIENTS", "1")
