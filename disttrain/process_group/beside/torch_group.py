"""A group of ours as one of torch.distributed's, whose calls go through our door.

torch calls the methods of `TorchGroup` from Python and, as DDP's reducer and functional collectives do, from C++. It
connects when it is first used, as the group that it stands for, whose collectives and its own have one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch

from disttrain.errors import BackendError, DisttrainError
from disttrain.process_group._c10d import TorchProcessGroup, register_transport
from disttrain.process_group.backends.c10d_backend import C10dBackend
from disttrain.process_group.calls.coalescing import Coalesced, coalescing_manager
from disttrain.process_group.calls.collectives import (
    all_gather_into_tensor,
    all_reduce,
    barrier,
    broadcast,
    reduce,
    reduce_scatter_tensor,
)
from disttrain.process_group.calls.list_collectives import (
    all_gather,
    all_to_all,
    all_to_all_single,
    gather,
    reduce_scatter,
    scatter,
)
from disttrain.process_group.calls.many import all_gather_into_tensor_coalesced, reduce_scatter_tensor_coalesced
from disttrain.process_group.calls.monitored import monitored_barrier
from disttrain.process_group.calls.point_to_point import irecv, isend
from disttrain.process_group.group import ProcessGroup
from disttrain.process_group.work import Work

Tensors = Sequence[torch.Tensor]


class TorchWork(torch.distributed.Work):
    """The handle of calls that torch has made; of none, where they are over already."""

    def __init__(self, works: Sequence[Work | None], outputs: Tensors = ()) -> None:
        super().__init__()
        self._works = [work for work in works if work is not None]
        self._outputs = list(outputs)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for all; without a timeout, or with one of nothing, for as long as the group allows."""
        for work in self._works:
            work.wait(timeout if timeout.total_seconds() > 0 else None)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> DisttrainError | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        if len(self._works) == 1:
            return self._works[0].transport_future()
        if self._works:
            return torch.futures.collect_all([work.get_future() for work in self._works])
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._outputs)
        return future

    def source_rank(self) -> int:
        return self._works[0].source_group_rank()

    def _source_rank(self) -> int:
        return self.source_rank()


class TorchGroup(TorchProcessGroup):  # type: ignore[misc]  # torch's stubs say less than its C++
    """torch's ProcessGroup over `group`; options are torch's, tensors come in lists of one."""

    def __init__(self, group: ProcessGroup, store: Any) -> None:
        super().__init__(group.group_rank, group.group_size)
        self._store = store
        self._group = group
        self._name = self._description = ""
        self._told: set[str] = set()
        self._batch = ExitStack()
        self._coalesced: Coalesced | None = None

    def allreduce(self, tensors: Tensors, opts: Any = None) -> TorchWork:
        tensors, op, is_async = _reduced(tensors, opts)
        return self._handle([all_reduce(tensor, op, self._group, is_async) for tensor in tensors], tensors)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> TorchWork:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any) -> TorchWork:
        (tensor,), op, is_async = _reduced(tensors, opts)
        return self._handle([reduce(tensor, None, op, self._group, is_async, opts.rootRank)], [tensor])

    def broadcast(self, tensors: Tensors, opts: Any = None) -> TorchWork:
        root = 0 if opts is None else opts.rootRank
        works = [broadcast(tensor, None, self._group, _is_async(opts), root) for tensor in tensors]
        return self._handle(works, tensors)

    def allgather(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> TorchWork:
        (outputs,), (tensor,) = output_lists, inputs
        return self._handle([all_gather(outputs, tensor, self._group, _is_async(opts))], outputs)

    def allgather_coalesced(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> TorchWork:
        # One list for each rank, with a tensor for each input.
        outputs = [[by_rank[position] for by_rank in output_lists] for position in range(len(inputs))]
        pairs = zip(outputs, inputs, strict=True)
        return self._handle([all_gather(parts, tensor, self._group, _is_async(opts)) for parts, tensor in pairs])

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> TorchWork:
        return self._handle([all_gather_into_tensor(output, input, self._group, _is_async(opts))], [output])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> TorchWork:
        works = [all_gather_into_tensor_coalesced(outputs, inputs, self._group, _is_async(opts))]
        return self._handle(works, outputs)

    def gather(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any) -> TorchWork:
        (tensor,), outputs = inputs, output_lists[0] if output_lists else None
        work = gather(tensor, outputs, None, self._group, _is_async(opts), opts.rootRank)
        return self._handle([work], outputs or ())

    def scatter(self, outputs: Tensors, input_lists: Sequence[Tensors], opts: Any) -> TorchWork:
        (tensor,), inputs = outputs, input_lists[0] if input_lists else None
        work = scatter(tensor, inputs, None, self._group, _is_async(opts), opts.rootRank)
        return self._handle([work], outputs)

    def reduce_scatter(self, outputs: Tensors, input_lists: Sequence[Tensors], opts: Any = None) -> TorchWork:
        (output,), op, is_async = _reduced(outputs, opts)
        return self._handle([reduce_scatter(output, input_lists[0], op, self._group, is_async)], outputs)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> TorchWork:
        _, op, is_async = _reduced((), opts)
        return self._handle([reduce_scatter_tensor(output, input, op, self._group, is_async)], [output])

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> TorchWork:
        _, op, is_async = _reduced((), opts)
        return self._handle([reduce_scatter_tensor_coalesced(outputs, inputs, op, self._group, is_async)], outputs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> TorchWork:
        return self._handle([all_to_all(outputs, inputs, self._group, _is_async(opts))], outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> TorchWork:
        work = all_to_all_single(output, input, output_sizes, input_sizes, self._group, _is_async(opts))
        return self._handle([work], [output])

    def barrier(self, opts: Any = None) -> TorchWork:
        device_ids = None if opts is None else opts.device_ids
        return self._handle([barrier(self._group, _is_async(opts), device_ids or None)])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        monitored_barrier(self._group, timeout, wait_all_ranks)

    def send(self, tensors: Tensors, dst_rank: int, tag: int) -> TorchWork:
        return self._handle([isend(tensor, None, self._group, tag, dst_rank) for tensor in tensors])

    def recv(self, tensors: Tensors, src_rank: int, tag: int) -> TorchWork:
        return self._handle([irecv(tensor, None, self._group, tag, src_rank) for tensor in tensors], tensors)

    def recv_anysource(self, tensors: Tensors, tag: int) -> TorchWork:
        return self._handle([irecv(tensor, None, self._group, tag) for tensor in tensors], tensors)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = self._batch.enter_context(coalescing_manager(self._group, device, async_ops=True))

    def _end_coalescing(self, device: torch.device) -> TorchWork:
        batch, self._coalesced = self._coalesced, None
        self._batch.close()
        return TorchWork([] if batch is None else batch.works)

    def get_group_store(self) -> Any:
        return self._store

    # C++ keeps names with the transports, which come later.
    @property
    def group_name(self) -> str:
        return self._name

    def getGroupName(self) -> str:  # noqa: N802  torch's name
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        return self._description

    def getGroupDesc(self) -> str:  # noqa: N802  torch's name
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device_type) for device_type in self._group.device_types]

    def _get_backend(self, device: torch.device) -> Any:
        """The C++ transport, for who asks about that; connects the group."""
        try:
            return self._tell(device.type)
        except BackendError as error:
            raise RuntimeError(str(error)) from error  # what torch catches

    def _handle(self, works: Sequence[Work | None], outputs: Tensors = ()) -> TorchWork:
        if len(self._told) < len(self._group.device_types):
            for device_type, kind in self._group.backend_classes.items():
                has_transport = issubclass(kind, C10dBackend) and self._group.is_connected(device_type)
                if has_transport and device_type not in self._told:
                    self._tell(device_type)
        return TorchWork(works, outputs)

    def _tell(self, device_type: str) -> Any:
        """Let C++, which asks for transports to read their names, know one that is connected."""
        name, transport = self._group.transport(device_type)
        if device_type not in self._told:
            self._told.add(device_type)
            register_transport(self, device_type, name, transport)
        return transport

    # Their names in earlier versions of torch.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _is_async(opts: Any) -> bool:
    # C++ waits by the handle, whatever the options say.
    return True if opts is None else bool(opts.asyncOp)


def _reduced(tensors: Tensors, opts: Any) -> tuple[Tensors, Any, bool]:
    op = torch.distributed.ReduceOp.SUM if opts is None else opts.reduceOp
    return tensors, op, _is_async(opts)
