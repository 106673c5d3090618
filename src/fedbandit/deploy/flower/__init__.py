"""Rounds over real devices, carried by Flower.

Only `grid`, `client_app` and `server_app` import Flower; the rounds themselves know nothing of how messages travel.
"""
