"""A running job: its watchdog, its steps, and the present calls of its ranks."""
