"""Stopping a job between two steps: on a scheduler's notice, or on a rank's own wish."""

from __future__ import annotations

from disttrain.process_group.current import current_world


def stop_requested() -> bool:
    """True, on all ranks at the same step, once a rank or a launcher has been told that the job has to go.

    Ask at the end of each step, on every rank; then save, and end with `disttrain.REQUEUE_EXIT_CODE`:

        if disttrain.stop_requested():
            checkpointer.save(step + 1, state)
            sys.exit(disttrain.REQUEUE_EXIT_CODE)

    The notice is SIGTERM or SIGUSR1, to the launcher of any node or to any rank, or `request_stop`. The first call on
    any rank has all of them handle the signals; before, they end a rank. A handler that was there before is called,
    too. A call costs about a microsecond, and no communication; only once, when a notice has come, the ranks agree
    through the store. Where a rank has left already, or does not answer, the answer stays False on all.
    Raises: GroupError before init_process_group.
    Collective: every rank, equally often.
    """
    stopping = current_world("stop_requested").stopping
    stopping.listen()
    return stopping.is_requested()


def request_stop(reason: str = "request_stop") -> None:
    """Have `stop_requested` say True on all ranks after a step: for notices that are no signals, such as a cloud's.

    Any rank may call it, alone, in any thread. It waits until the ranks have agreed on the step.
    """
    current_world("request_stop").stopping.request(reason)
