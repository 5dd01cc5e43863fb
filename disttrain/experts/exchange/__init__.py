"""Rows of tokens to the ranks that hold their experts, and back."""
