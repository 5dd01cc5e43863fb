"""The format of a save: boxes, data files, the manifest."""
