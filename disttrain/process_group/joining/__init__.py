"""The rendezvous of a job's ranks, and the connecting of groups."""
