"""The collectives, under torch.distributed's names."""
