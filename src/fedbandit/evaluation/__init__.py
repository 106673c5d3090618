"""Measuring: held-out metrics, regret, recovery, the deployment gate, off-policy evaluation,
theory. Never trains.
"""
