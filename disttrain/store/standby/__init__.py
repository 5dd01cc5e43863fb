"""A second server that follows the first, and takes its place."""
