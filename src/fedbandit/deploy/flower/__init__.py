"""Flower as transport: apps, messages, processes, and the exchanges of secure sums. Nothing else
imports it.
"""
