"""What each rank called last, kept in a ring that outlives its process."""
