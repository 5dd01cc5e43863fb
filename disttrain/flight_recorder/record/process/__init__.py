"""A process as the recorder sees it: its threads, stacks and lines of code."""
