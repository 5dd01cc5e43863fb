"""A proposal how to cut a model, checked and printed."""
