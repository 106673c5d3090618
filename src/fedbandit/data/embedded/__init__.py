"""Data sets that need no download: made from a seed, with statistics like those of the published
ones.
"""
