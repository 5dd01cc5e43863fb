"""Every error that disttrain raises on purpose.

    DisttrainError                   catch this to catch them all
    ├── SettingError                 an environment variable or option with a value that makes no sense
    ├── StoreError                   the rendezvous store
    │   ├── StoreConnectionError         nobody answers, or the connection broke
    │   ├── StoreTimeoutError            a key, or a member of a barrier, did not come in time
    │   ├── StoreAddressError            the server cannot listen where it should
    │   ├── StoreAuthError               wrong token or certificate, or none where one is needed
    │   ├── StoreQueueEmptyError         nothing in the queue, and no wish to wait
    │   └── StoreLimitError              a key, value, frame or total over its limit
    ├── RendezvousError              nodes or ranks that don't fit together (a ValueError too)
    ├── GroupError                   no such group, not a member, already destroyed, rank out of range (a ValueError)
    ├── BackendError                 no transport serves the device, or the transport failed
    │   ├── CollectiveTimeoutError       a collective did not end in time
    │   └── CollectiveMismatchError      ranks called different collectives
    ├── ArgumentError                something else where a tensor, or a list of tensors, belongs (a TypeError too)
    ├── ShapeError                   sizes, dtypes or memory formats that don't fit (a ValueError too)
    ├── MeshError                    a mesh that cannot be, or an axis it does not have (a ValueError too)
    │   └── HalfMovedError               a mesh, placement or group of disttrain's in a function of torch's
    ├── LayoutError                  placements that cannot be, or an operation with no rule for them
    ├── RankMismatchError            compare_ranks() has found ranks that do different things, or hold different values
    ├── ShardingError                fully_shard or a parallel style on a module it cannot take
    ├── RoutingError                 a router's rule that cannot be, or scores that are nan (a ValueError too)
    ├── CompileError                 compile_blocks on a model it cannot take, or in an order that would be wrong
    ├── ScheduleError                a pipeline schedule that cannot be made, or must not be run (a ValueError too)
    ├── CheckpointError              a save that cannot be written or read
    │   ├── CheckpointCorruptError       bytes that are not those that were saved
    │   └── StateDictError               a state dict that does not fit its model or optimizers (a RuntimeError too)
    ├── DataError                    tokens, samples or batches that cannot be had as asked (a ValueError too)
    ├── FlightDumpError              a dump of the flight recorder that cannot be made, or not be read
    └── LaunchError                  a job that cannot be started, or a rank of `launch` that failed

Errors of the store, of groups and of transports are also those that torch.distributed has names for, so that `except`
finds them:

    DistError                        a RuntimeError
    ├── DistStoreError                   the store's
    │   └── QueueEmptyError              its StoreQueueEmptyError
    ├── DistNetworkError                 its StoreConnectionError and StoreAddressError
    └── DistBackendError                 a transport's

An error is an answer, in one line: what was asked, which values offend which rule, what to do, and where it happened:
`shard: dim 0 has size 6, mesh axis 'tp' has size 4; even sharding needs a multiple. Pad to 8. [rank 3, dp=2 tp=4]`
"""

from __future__ import annotations


class DisttrainError(Exception):
    """An answer: `operation: problem remedy [rank R, where]`.

    Args: operation  the public name that was called;  problem  offending values and the rule, a whole sentence;
          remedy  what to do, a whole sentence;  rank  the global rank, when there is one;  where  mesh, group, host.
    """

    def __init__(
        self, operation: str, problem: str, remedy: str = "", *, rank: int | None = None, where: str = ""
    ) -> None:
        self.operation = operation
        self.problem = problem
        self.remedy = remedy
        self.rank = rank
        self.where = where
        super().__init__(self._text())

    def __reduce__(self) -> tuple[object, ...]:
        # Others send errors between processes as pickles, where the arguments of `__init__` would be missing.
        return _again, (type(self), self.args), self.__dict__

    def say_where(self, where: str) -> None:
        """Say where it happened, which the one that raised it did not know."""
        self.where = where
        self.args = (self._text(),)

    def _text(self) -> str:
        locations = [] if self.rank is None else [f"rank {self.rank}"]
        locations += [self.where] if self.where else []
        answer = " ".join(part for part in (f"{self.operation}: {self.problem}", self.remedy) if part)
        return f"{answer} [{', '.join(locations)}]" if locations else answer


def _again(kind: type[DisttrainError], args: tuple[object, ...]) -> DisttrainError:
    error = kind.__new__(kind)
    error.args = args
    return error


class DistError(RuntimeError):
    """torch.distributed's name for what goes wrong with the store, with groups and with transports."""


class DistStoreError(DistError):
    """torch's name for an error of the store."""


class DistNetworkError(DistError):
    """torch's name for a connection that cannot be had, or broke."""


class DistBackendError(DistError):
    """torch's name for an error of a transport."""


class QueueEmptyError(DistStoreError):
    """torch's name for a queue of the store's that has nothing in it."""


class SettingError(DisttrainError, ValueError):
    """An environment variable or option has a value that makes no sense."""


class StoreError(DisttrainError, DistStoreError):
    """The rendezvous store could not do what was asked."""


class StoreConnectionError(StoreError, DistNetworkError, ConnectionError):
    """Nobody answers at the store's address, or the connection broke."""


class StoreTimeoutError(StoreError, TimeoutError):
    """A key, or a member of a barrier, did not come in time."""


class StoreAddressError(StoreError, DistNetworkError):
    """The store's server cannot listen at its address: taken, not this machine's, or not allowed."""


class StoreAuthError(StoreError):
    """The other side could not prove that it knows the job's token, or shows no certificate of the job's authority."""


class StoreQueueEmptyError(StoreError, QueueEmptyError):
    """The queue is empty, and the caller did not want to wait."""


class StoreLimitError(StoreError, ValueError):
    """A key, value, frame or total is over its limit; the message names the limit's setting."""


class RendezvousError(DisttrainError, DistError, ValueError):
    """Nodes or ranks don't fit together: world sizes differ, a rank is taken twice, somebody never came."""


class GroupError(DisttrainError, DistError, ValueError):
    """No such group, not a member of it, a destroyed one, or a rank out of its range."""


class BackendError(DisttrainError, DistBackendError):
    """No transport serves the tensor's device, or the transport failed."""


class CollectiveTimeoutError(BackendError, TimeoutError):
    """A collective did not end in time."""


class CollectiveMismatchError(BackendError):
    """Ranks of one group called different collectives, or the same with different sizes."""


class ArgumentError(DisttrainError, TypeError):
    """Something else where a tensor, or a list of tensors, belongs."""


class ShapeError(DisttrainError, ValueError):
    """Sizes, dtypes or memory formats don't fit together."""


class MeshError(DisttrainError, ValueError):
    """A mesh that cannot be, or an axis it does not have."""


class HalfMovedError(MeshError, AttributeError):
    """A function of torch's was given a mesh, a placement or a group of disttrain's: some imports are still torch's.

    For who asks by `hasattr`, the mesh has not what that function reads.
    """


class LayoutError(DisttrainError):
    """Placements that cannot be, or an operation that has no rule for them."""


class RankMismatchError(DisttrainError):
    """compare_ranks() has found ranks that do different things to one DTensor, or hold different values of it."""


class ShardingError(DisttrainError):
    """`fully_shard` or a parallel style met a module or parameter it cannot take."""


class RoutingError(DisttrainError, ValueError):
    """A router's rule that cannot be, or scores of experts that are nan."""


class CompileError(DisttrainError):
    """Blocks of a model cannot be compiled, or not after what was done to them."""


class ScheduleError(DisttrainError, ValueError):
    """A pipeline schedule that cannot be made from what was asked, or that would compute wrongly or never end."""


class CheckpointError(DisttrainError):
    """A save that cannot be written or read."""


class CheckpointCorruptError(CheckpointError):
    """Bytes on disk are not those that were saved."""


class StateDictError(CheckpointError, RuntimeError):
    """A state dict does not fit the model or the optimizers that it is for."""


class DataError(DisttrainError, ValueError):
    """Tokens, samples or batches cannot be had as asked."""


class FlightDumpError(DisttrainError):
    """A dump of the flight recorder cannot be made, or nothing in the file can be used."""


class LaunchError(DisttrainError):
    """A job that cannot be started as asked."""
