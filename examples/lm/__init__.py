"""The parts of train_lm.py: a byte-level language model with mixture-of-experts layers, one idea a file."""
