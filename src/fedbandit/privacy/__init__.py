"""Privacy: one frozen plan from which clipping, sampling, noise and accounting come, so that they cannot disagree.

Knows sums of clipped updates and who may take part when; knows nothing of policies, rewards, models or data.
"""
