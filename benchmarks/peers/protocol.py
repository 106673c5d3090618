"""How the harness talks to a contestant: one line in, one round, one line out. Standard library only.

A contestant says `ready` when it is set up. For every line it gets it plays one round and answers with the seconds it
took. The harness can so let contestants take turns, whatever shape their own loops have.
"""

import json
import os
import sys
import time
from collections.abc import Callable


class Requests:
    """For loops that call back between rounds: `wait()` before each round, `done()` after it."""

    def __init__(self) -> None:
        # Libraries print what they like; the answers go to the real standard output, everything else to the errors.
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._start = 0.0

    def wait(self) -> bool:
        """Wait for the next request; False: no more rounds are wanted."""
        if self._start == 0.0:
            print("ready", file=self._answers)
        line = sys.stdin.readline()
        self._start = time.perf_counter()
        return bool(line)

    def done(self) -> None:
        """Answer: the round is over."""
        print(json.dumps({"seconds": time.perf_counter() - self._start}), file=self._answers)


def serve(run_round: Callable[[], object]) -> None:
    """For loops of our own: play a round whenever one is asked for."""
    requests = Requests()
    while requests.wait():
        run_round()
        requests.done()
