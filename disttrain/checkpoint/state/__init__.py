"""What a state is made of, taken apart into named leaves and put together."""
