"""Federated learning: state, rounds, clients, cohorts, learners, the pipeline of updates and the
server's step.

Knows nothing of configurations, privacy or run folders.
"""
