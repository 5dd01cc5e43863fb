"""Finds and refuses uses that would train nothing, or something else, without an error."""
