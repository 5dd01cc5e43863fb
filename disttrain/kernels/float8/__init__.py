"""Linear layers whose products are of float8."""
