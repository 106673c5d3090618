"""Runs in folders: resumed, never repaired; one or many, on this machine or on a cluster."""
