"""Which transport serves which device."""

from __future__ import annotations

import pytest

from disttrain.errors import BackendError
from disttrain.process_group.backends import BACKENDS, choose_backends


def test_all_that_the_machine_has() -> None:
    chosen = choose_backends(None)
    assert chosen["cpu"] is BACKENDS["gloo"]
    assert ("cuda" in chosen) == BACKENDS["nccl"].is_available()


def test_by_name() -> None:
    assert choose_backends("gloo") == {"cpu": BACKENDS["gloo"]}
    assert choose_backends("cpu:fake,cuda:fake") == dict.fromkeys(("cpu", "cuda"), BACKENDS["fake"])


@pytest.mark.parametrize(
    ("wanted", "rule"),
    [("glooo", "no backend 'glooo'"), ("cuda:gloo", "does not serve device 'cuda'"), ("cpu:", "no backend ''")],
)
def test_what_cannot_be_is_refused(wanted: str, rule: str) -> None:
    with pytest.raises(BackendError, match=rule):
        choose_backends(wanted)
