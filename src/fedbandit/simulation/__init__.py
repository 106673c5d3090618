"""Simulations: pre-training, then rounds of bandit feedback, from Python."""
