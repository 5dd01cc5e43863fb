"""The launcher's screen: lines, and a table below them."""
