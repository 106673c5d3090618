"""Rounds over real devices, carried by Flower.

Only the apps, `grid`, `records`, and `masking` and `secure_client` for secure sums import Flower; the rounds themselves
know nothing of how messages travel.
"""
