"""Dispatch of operators on DTensors: look-up, planning, execution on the local parts."""
