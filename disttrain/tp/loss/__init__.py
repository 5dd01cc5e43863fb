"""Cross-entropy of logits whose classes are cut."""
