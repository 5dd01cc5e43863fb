"""Learns the sizes of messages: the sender tells them through the store, once, or every time if shapes may change."""

from __future__ import annotations

import time
from collections.abc import Callable

from disttrain.errors import CollectiveTimeoutError, StoreTimeoutError
from disttrain.pipelining.runtime.message_metadata import MessageMetadata, pack_metadata, unpack_metadata
from disttrain.store import Store

_Message = tuple[int, int, int]
"""From which stage, to which, and of which microbatch, where metadata may change between these; else 0."""

_SLICE_S = 0.5
"""The interval at which a waiting rank checks whether another has failed."""


class MetadataExchange:
    """The metadata of what goes from stage to stage, on one rank.

    Args: store  of this pipeline alone;  timeout_s  how long to wait for a sender;  check  raises when another rank has
          failed;  is_dynamic  metadata may change from one microbatch to the next.
    """

    def __init__(self, store: Store, timeout_s: float, check: Callable[[], None], *, is_dynamic: bool) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._check = check
        self._is_dynamic = is_dynamic
        self._told: dict[_Message, MessageMetadata] = {}
        self._heard: dict[_Message, MessageMetadata] = {}
        self._num_passes = 0
        self.is_learning = True
        """True while the metadata of a message is not known before it arrives."""

    def end_pass(self) -> None:
        """All metadata has been told and heard."""
        self.is_learning = self._is_dynamic
        self._num_passes += 1
        if self._is_dynamic:
            self._told.clear()
            self._heard.clear()

    def tell(self, source: int, target: int, microbatch: int, metadata: MessageMetadata) -> None:
        """`source` is about to send this to `target`.

        Raises: ShapeError when it is not what the first microbatch was; ScheduleError for what cannot travel.
        """
        message = source, target, microbatch * self._is_dynamic
        metadata_told = self._told.get(message)
        if metadata_told is None:
            self._told[message] = metadata
            self._store.set(self._key(message), pack_metadata(metadata))
        elif metadata_told is not metadata:
            metadata_told.check(f"what stage {source} returns for microbatch {microbatch}", metadata)

    def told(self, source: int, target: int, microbatch: int) -> MessageMetadata:
        """Returns what `source` has told of its messages to `target`."""
        return self._told[source, target, microbatch * self._is_dynamic]

    def hear(self, source: int, target: int, microbatch: int) -> MessageMetadata:
        """Waits until `source` tells of its messages to `target`. Raises: CollectiveTimeoutError when it does not."""
        message = source, target, microbatch * self._is_dynamic
        metadata = self._heard.get(message)
        if metadata is None:
            key = self._key(message)
            self._wait(key, message)
            metadata = self._heard[message] = unpack_metadata(self._store.get(key))
            self._store.delete_key(key)
        return metadata

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
