"""Decides when parameters are gathered, freed and reduced: a machine without tensors. Events in, commands out.

An event is a function that yields commands one after the other. It changes the state as they are carried out: if one
fails, the later ones have not happened. Nothing here communicates, waits or holds memory, so `estimate` can simulate a
step with it.
"""
