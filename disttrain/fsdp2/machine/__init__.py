"""Decides when parameters are gathered, freed and reduced: a machine without tensors. Events in, commands out.

An event is a function that yields commands, one after the other, and changes its state as they are carried out: where
one fails, what comes after it has not happened. Nothing here communicates, waits or has memory, so a step can be gone
through without any, as `estimate` does.
"""
