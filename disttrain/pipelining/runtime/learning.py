"""Learns the sizes of messages: the sender tells them through the store, once, or every time if shapes may change."""

from __future__ import annotations

import time
from collections.abc import Callable

from disttrain.errors import CollectiveTimeoutError, StoreTimeoutError
from disttrain.pipelining.runtime.message_metadata import Form, pack_form, unpack_form
from disttrain.store import Store

_Message = tuple[int, int, int]
"""From which stage, to which, and of which microbatch, where forms may change between these; else 0."""

_SLICE_S = 0.5
"""The interval at which a waiting rank checks whether another has failed."""


class Forms:
    """The forms of what goes from stage to stage, on one rank.

    Args: store  of this pipeline alone;  timeout_s  how long to wait for a sender;  check  raises when another rank has
          failed;  is_dynamic  forms may change from one microbatch to the next.
    """

    def __init__(self, store: Store, timeout_s: float, check: Callable[[], None], *, is_dynamic: bool) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._check = check
        self._is_dynamic = is_dynamic
        self._told: dict[_Message, Form] = {}
        self._heard: dict[_Message, Form] = {}
        self._num_passes = 0
        self.is_learning = True
        """True while the form of a message is not known before it arrives."""

    def end_pass(self) -> None:
        """All forms have been told and heard."""
        self.is_learning = self._is_dynamic
        self._num_passes += 1
        if self._is_dynamic:
            self._told.clear()
            self._heard.clear()

    def tell(self, source: int, target: int, microbatch: int, form: Form) -> None:
        """`source` is about to send this to `target`.

        Raises: ShapeError when it is not what the first microbatch was; ScheduleError for what cannot travel.
        """
        message = source, target, microbatch * self._is_dynamic
        form_told = self._told.get(message)
        if form_told is None:
            self._told[message] = form
            self._store.set(self._key(message), pack_form(form))
        elif form_told is not form:
            form_told.check(f"what stage {source} returns for microbatch {microbatch}", form)

    def told(self, source: int, target: int, microbatch: int) -> Form:
        """Returns what `source` has told of its messages to `target`."""
        return self._told[source, target, microbatch * self._is_dynamic]

    def hear(self, source: int, target: int, microbatch: int) -> Form:
        """Waits until `source` tells of its messages to `target`. Raises: CollectiveTimeoutError when it does not."""
        message = source, target, microbatch * self._is_dynamic
        form = self._heard.get(message)
        if form is None:
            key = self._key(message)
            self._wait(key, message)
            form = self._heard[message] = unpack_form(self._store.get(key))
            self._store.delete_key(key)
        return form

    def _key(self, message: _Message) -> str:
        """With the pass: a sender may be several of them ahead."""
        source, target, microbatch = message
        return f"{self._num_passes}/{source}>{target}/{microbatch}"

    def _wait(self, key: str, message: _Message) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            try:
                return self._store.wait([key], _SLICE_S)
            except StoreTimeoutError as error:
                self._check()
                if time.monotonic() > deadline_s:
                    source, target, microbatch = message
                    raise CollectiveTimeoutError(
                        "pipelining.step",
                        f"stage {source} has not sent anything to stage {target} for microbatch {microbatch} within "
                        f"{self._timeout_s:g} s.",
                        "Look for a rank that died, hangs, or has not come to this step.",
                    ) from error
