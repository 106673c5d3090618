"""Studies made of runs: sweeps, search, advice, drift, delay, regret, off-policy tuning, privacy."""
