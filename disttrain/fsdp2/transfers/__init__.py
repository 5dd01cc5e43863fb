"""Sends parameters and gradients: the form of messages, how many modules share one, and the communicators."""
