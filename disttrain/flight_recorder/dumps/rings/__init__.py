"""Ring files, read as dumps. Torch-free."""
