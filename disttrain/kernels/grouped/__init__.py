"""Products of rows that are sorted by expert, all experts' in one launch, and the sorting itself."""
