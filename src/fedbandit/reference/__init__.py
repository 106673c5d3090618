"""The paper's algorithms in plain numpy: float64, one event at a time, loops. Slow on purpose; read
this first.

`inference` is Algorithm 2 (a client explores and logs), `optimization` is Algorithm 3 (clients
train, the server steps), `simulation` is Algorithm 4 (rounds, deployments and rewards), and
`models` has the gradients, written out by hand. `statistics` is LinUCB over fixed actions and
candidates.

Nothing here is used by the fast path, and nothing of the fast path is used here, except for the
addresses of random draws: with those shared, a whole run of the real engine in float64 agrees with
this one to rounding.
"""

from fedbandit.reference.simulation import run
from fedbandit.reference.statistics import run_linucb

__all__ = ["run", "run_linucb"]
