"""Cuts a model into stages, and splits the backward of a stage."""
