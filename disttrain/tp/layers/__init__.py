"""Linear layers and norms that compute on their parts."""
