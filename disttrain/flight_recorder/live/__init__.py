"""A job that runs: its watchdog, its steps, what its ranks are at."""
