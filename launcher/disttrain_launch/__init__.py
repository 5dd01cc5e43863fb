"""disttrain-launch: start a script once per GPU or core, on one node or many, again where it must, and leave nothing
behind.

The parts, from the command line inwards:

    cli, request/       argv and variables in, a frozen JobSpec out; the only place that refuses flags
    clusters/           what Slurm, Kubernetes or MPI say about this node, as flags that nobody gave; pure
    submit/             the same flags as a batch script, a manifest, or launchers started by ssh
    rendezvous/
      rounds, messages  nodes, rounds and ranks; what nodes and node 0 tell each other; pure
      state             nodes that come, go and fail in, rounds out; pure, as are node_numbers, pending, refusals,
                        restarts beside it
      node0             its shell over disttrain.store; sweeping removes what old rounds left there
      lease, standby    who leads, who keeps the store's standby and takes node 0's place
      inherited         the rendezvous as a successor of node 0 goes on with it; pure
      link, part        a node's side: its reports, node 0's words; following them, round after round
    workers/
      environment       what each worker finds in its environment; pure
      supervision       worker exits, signals and words in, what to stop and why it ended out; pure
      agent             the event loop that runs them
      worker, warden    processes: start one, find and stop all that it left behind
      board             what scripts report
      outcome           how a job ended, as a value
      dumps, dump_asking
                        the flight recorders' dumps: where they go; asked for
    output/
      streams/          bytes of many streams in, whole lines and per-rank files out; equal lines of ranks folded
      terminal/         the screen: prefixes, bars, a table, a terminal that may be slow
      view, publishing  what there is to see of a job, as values; a thread that tells it to the store
      events, event_log what happened as records, pure; their file
      failure/          a job that failed: its report, each worker's end, the story of the dumps
    status, whereabouts the same from elsewhere; where jobs are

Nothing here imports torch.
"""

from __future__ import annotations

from disttrain_launch.cli import main
from disttrain_launch.request.job import JobSpec

__all__ = ["JobSpec", "main"]
