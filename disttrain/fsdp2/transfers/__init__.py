"""Moves values over the wire: in which form, how many modules' at once, over which communicators."""
