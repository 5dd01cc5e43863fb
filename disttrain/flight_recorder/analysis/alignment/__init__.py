"""Dumps of all ranks side by side: collectives and messages with all their ends."""
