"""Flower as transport: apps, messages, processes, and secure sums over its SecAgg+. Nothing else imports it."""
