"""Finds and refuses uses that would silently train nothing, or something else."""
