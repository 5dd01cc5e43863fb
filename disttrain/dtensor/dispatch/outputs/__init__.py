"""Shapes, strides and dtypes of an operator's global results."""
