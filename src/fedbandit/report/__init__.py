"""Pages to look at: a report of finished runs, and a live page of running ones."""
