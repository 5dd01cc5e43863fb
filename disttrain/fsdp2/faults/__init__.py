"""What would train nothing, or something else, without a word: found and refused."""
