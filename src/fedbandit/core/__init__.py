"""The ground of everything else: errors, small files, randomness, timing, finding parts by name,
ragged arrays.

Knows nothing of bandits, data sets or federated learning.
"""
