"""Benchmarks: fedbandit beside a plain torch loop and other simulators, on the same data in the same run."""
