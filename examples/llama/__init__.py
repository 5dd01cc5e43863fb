"""What `train_llama.py` leans on: the network, its parts on ranks, data, weights of others, and what a person sees."""
