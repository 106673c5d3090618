"""Results of runs: reading them, tables, pictures. Knows run folders as files, and nothing of how
runs are made.
"""

from fedbandit.evaluation.metrics import Recovery, recoveries
from fedbandit.results.reading import RunRecord
from fedbandit.results.results import Results, ResultsSummary

__all__ = ["Recovery", "Results", "ResultsSummary", "RunRecord", "recoveries"]
