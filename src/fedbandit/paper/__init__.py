"""The paper: its figures, what they claim, and how ours compare."""
