"""`disttrain-launch submit`: the job that flags describe, handed to a cluster.

command     flags of all three, and which of the launcher's go along
request     what every cluster needs to know of the job, as one value; what is wrong is refused here
slurm       that value in, a batch script out; pure
kubernetes  that value in, a manifest out; pure
ssh         hosts in, what each is told out; pure
fan_out     starts ssh to all hosts, shows what they print, ends them together
far_end     runs on each of these hosts, between ssh and the launcher there
"""

from __future__ import annotations
