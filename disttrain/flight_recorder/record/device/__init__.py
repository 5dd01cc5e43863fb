"""Progress of a GPU: marks on its streams and within its graphs."""
