"""The products of gated linear units."""
