"""What workers print, and what the launcher says of a job."""
