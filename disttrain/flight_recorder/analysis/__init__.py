"""Makes verdicts of the dumps of all ranks."""
