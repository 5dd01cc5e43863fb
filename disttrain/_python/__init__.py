"""Parts of Python that need care: pickles, classes made while it runs, garbage collections, signals."""
