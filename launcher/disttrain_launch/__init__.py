"""disttrain-launch: start a script once per GPU or core, on one node or many, and leave nothing behind.

The parts, from the command line inwards:

    cli, flags, job     argv and variables in, a frozen JobSpec out; the only place that refuses flags
    clusters            what Slurm, Kubernetes or MPI say about this node, as flags that nobody gave; pure
    submit              the same flags as a batch script, a manifest, or launchers started by ssh
    handed_token        the job's token from standard input
    devices             how many GPUs and cores this node has
    rendezvous_state    nodes announce themselves, one round comes out; pure
    rendezvous          the same over disttrain.store, and how nodes tell each other of the job's end
    environment         what each worker finds in its environment; pure
    supervision         worker exits, signals and peers in, what to stop and how it ended out; pure
    agent               the event loop that runs them
    worker, warden      processes: start one, find and stop all that it left behind
    logs, screen, streams, output
                        bytes of many streams in, whole prefixed lines and per-rank files out
    outcome, report     how a job ended as a value, and as text

Nothing here imports torch.
"""

from __future__ import annotations

from disttrain_launch.cli import main
from disttrain_launch.job import JobSpec

__all__ = ["JobSpec", "main"]
