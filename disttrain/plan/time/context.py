"""Counts the keys and values that ranks along cp send each other, over which links, and estimates how long that takes.

A rank has two mirrored runs of each sequence, and needs of every other rank the keys that its queries see: all of both
runs, or one. They come while it computes with those that came before, and in backward once more, with their gradients
going back. A rank talks with others of its host and with other hosts at once; the slower sets the time.
"""

from __future__ import annotations

from functools import cache

from disttrain.plan.job import Choice, Job
from disttrain.plan.model.context import key_elements
from disttrain.plan.time.exchange import Exchange

_SEEN_SHARE = 0.75
"""Of another rank's keys: all that one of two ranks sees of the other's, and half that the other one sees."""


@cache
def keys_of(job: Job, choice: Choice) -> Exchange | None:
    """Keys and values of one microbatch in one block, one way; None where there is nobody to send to."""
    cp, hardware = choice.mesh.cp, job.hardware
    if cp == 1:
        return None
    on_host = choice.mesh.num_on_node("cp", job.node_size)
    to_one = _SEEN_SHARE * choice.tokens(job) * key_elements(job, choice) * job.precision.compute_bytes
    within, between = (on_host - 1) * to_one, (cp - on_host) * to_one
    latency_s = hardware.node_latency_s if on_host == cp else hardware.network_latency_s
    slower = max(within / hardware.node_bytes_per_s, between / hardware.network_bytes_per_s)
    return Exchange(within, between, latency_s, latency_s + slower)


def exposed_s(job: Job, choice: Choice, times: int, attention_s: float, taken_share: float) -> float:
    """The time that the exchange adds to attention of `attention_s`, beside whose parts of the ranks before the last it
    goes, `times` as much as one way. What is hidden takes `taken_share` of its time from what hides it, if it leaves
    the host; within one, copy engines do it."""
    keys = keys_of(job, choice)
    if keys is None:
        return 0.0
    sent_s, cp = times * keys.seconds, choice.mesh.cp
    hiding_s = attention_s * (cp - 1) / cp
    hidden_s = min(sent_s, hiding_s)
    return sent_s - hidden_s + taken_share * hidden_s * (keys.between_bytes > 0)
