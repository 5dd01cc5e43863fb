"""The ring: a rank's last records in a mapped file."""
