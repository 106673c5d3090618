"""Sums of which the server sees nothing but the sum: double masks, in a device's half and a
server's. No I/O here.
"""
