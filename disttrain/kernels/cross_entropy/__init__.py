"""Cross-entropy of logits, and of a linear layer's output without its logits."""
