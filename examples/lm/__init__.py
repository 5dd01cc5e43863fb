"""The parts of `train_lm.py`: the network, the text, the screen, and what a run leaves behind."""
