"""Records each rank's last calls in a ring that outlives its process."""
