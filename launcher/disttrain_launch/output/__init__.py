"""The output of workers, and the launcher's own words about a job."""
