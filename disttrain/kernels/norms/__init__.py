"""RMSNorm and LayerNorm, with a residual path."""
