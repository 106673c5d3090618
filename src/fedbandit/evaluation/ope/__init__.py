"""Off-policy evaluation from sums that clients return; `fedbandit.ope` is its public name."""
