"""What train_mixture.py is made of."""
