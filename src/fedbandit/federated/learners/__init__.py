"""Learners: how a chunk of clients scores and trains. Kernels for the built-in models, autograd for
any other.
"""
