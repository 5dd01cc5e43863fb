"""Our groups for torch.distributed, and its groups for us."""
