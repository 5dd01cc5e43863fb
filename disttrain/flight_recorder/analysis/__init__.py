"""From the dumps of all ranks to verdicts."""
