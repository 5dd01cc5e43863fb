"""disttrain-launch: start a script once per GPU or core, on one node or many, again where it must, and leave nothing
behind.

The parts, from the command line inwards:

    cli, flags, job     argv and variables in, a frozen JobSpec out; the only place that refuses flags
    clusters            what Slurm, Kubernetes or MPI say about this node, as flags that nobody gave; pure
    submit              the same flags as a batch script, a manifest, or launchers started by ssh
    handed_token        the job's token from standard input
    rounds, messages    nodes, places and ranks; what nodes and node 0 tell each other; pure
    rendezvous_state    nodes that come, go and fail in, rounds out; with peers, held, refusals and restarts; pure
    rendezvous          node 0's shell around it, over disttrain.store; sweeping removes what old rounds left there
    lease, standby       who leads, who keeps the store's standby and takes node 0's place
    inherited           the rendezvous as a successor of node 0 goes on with it; pure
    link                a node's side: its reports, node 0's words
    part                a node's part: follow the words, round after round
    environment         what each worker finds in its environment; pure
    supervision         worker exits, signals and words in, what to stop and why it ended out; pure
    agent               the event loop that runs them
    worker, warden      processes: start one, find and stop all that it left behind
    logs, streams, output
                        bytes of many streams in, whole lines and per-rank files out
    folding             equal lines of ranks in, one line out; pure
    merging, screen     its shell: prefixes, bars, the table's place, a terminal that may be slow
    board, view         what scripts report; what there is to see of a job; as values
    telling, table      a thread that tells it to the store; as a table
    status, whereabouts the same from elsewhere; where jobs are
    events, event_log   what happened as records, pure; their file
    outcome, report     how a job ended as a value, and as text
    dumps, dump_asking, dump_story
                        the flight recorders' dumps: where they go; of a job that fails, asked for and told

Nothing here imports torch.
"""

from __future__ import annotations

from disttrain_launch.cli import main
from disttrain_launch.request.job import JobSpec

__all__ = ["JobSpec", "main"]
