"""Data for a trainer: which samples are whose, tokens on the disk, packed documents, batches that are there in time.

Loaders have `state_dict` and `load_state_dict`, and stand in a checkpoint's state as they are. Samples do not depend on
how many replicas share them, so another mesh goes on where the last one stopped.

    windows = Windows(TokenArray.open("shards"), length=2048, seed=0)
    batches = Prefetcher(Loader(windows, batch_size=512, mesh=mesh["dp"], endless=True), device)
    state = {**training_state(model, optimizer), "data": batches}
    for step in range(num_steps):
        rows = next(batches)    # this replica's
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from disttrain.lazy_names import lazily

if TYPE_CHECKING:
    from disttrain.data.loader import Loader as Loader
    from disttrain.data.order import Sample as Sample
    from disttrain.data.order import SampleOrder as SampleOrder
    from disttrain.data.order import permuted as permuted
    from disttrain.data.packing import PackedDocuments as PackedDocuments
    from disttrain.data.packing import Piece as Piece
    from disttrain.data.packing import documents_of as documents_of
    from disttrain.data.packing import pack as pack
    from disttrain.data.prefetcher import Prefetcher as Prefetcher
    from disttrain.data.stream_loader import StreamLoader as StreamLoader
    from disttrain.data.token_array import TokenArray as TokenArray
    from disttrain.data.token_folder import TokenWriter as TokenWriter
    from disttrain.data.token_folder import read_manifest as read_manifest
    from disttrain.data.windows import Windows as Windows

__getattr__, __dir__, __all__ = lazily(__name__)
