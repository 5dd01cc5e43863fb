"""What sharded modules have, take and return."""
