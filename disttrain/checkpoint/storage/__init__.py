"""Storage of saves: reads, writes, locks and replaces files."""
