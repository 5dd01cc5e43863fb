"""TLS for the store's wire."""
