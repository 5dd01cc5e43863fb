"""How ranks find each other, and groups connect."""
