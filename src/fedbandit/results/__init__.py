"""What came out of runs, to look at: tables and pictures."""
