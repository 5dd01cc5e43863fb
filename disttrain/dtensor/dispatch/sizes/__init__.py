"""Plans that serve calls with other sizes."""
