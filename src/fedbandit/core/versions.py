"""The results number: which runs can be continued, compared and reused, whatever else has changed in the code."""

# Raise this in the commit that changes any number that a run computes, and store the digests anew as
# tests/test_results_number.py says. Runs and pre-trained models of another number are then not continued or reused;
# long runs survive every commit that leaves it alone.
RESULTS = 1
