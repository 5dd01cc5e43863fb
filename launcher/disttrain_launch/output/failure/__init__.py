"""The end of a job that failed: who is to blame, and how each worker ended."""
