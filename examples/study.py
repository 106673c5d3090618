# %% [markdown]
# # Does exploration pay?
# Two exploration rules on the embedded `topics` data, two seeds each. Run it as a script, or as a notebook: VS Code
# and Jupyter with jupytext read the `# %%` marks. If it is interrupted, run it again to resume.

# %%
import numpy as np
import pandas as pd

from fedbandit import evaluate, preset, simulate, sweep

rules = [f"so-scratch-{policy}" for policy in ("greedy", "softmax")]
changes = {"rounds": 100, "deploy_every": 20, "clients_per_round": 32}
results = sweep({"start": rules, "set": changes, "seeds": 2}, "study")
print(results.summary())

# %% The reward of each seed in the last period, and a picture of all rounds
frame = results.to_pandas()
last = frame[frame["round"] > 80].groupby(["configuration", "seed"])["reward"].mean()
print(last.unstack().round(3))
results.plot(path="study.png")

# %% What would uniformly random choices earn? The log of a run tells, without running them.
log = []


def keep(state, events, metrics):
    seen = events()
    visit = 100 * state.round + np.repeat(np.arange(metrics["clients"]), np.diff(seen.bounds))
    columns = {
        "visit": visit,
        "action": seen.actions,
        "reward": seen.rewards,
        "propensity": seen.propensities,
    }
    log.append(pd.DataFrame(columns))


exploring = preset("so-scratch-softmax").with_values({**changes, "policy.beta": 0.2})
simulate(exploring, callbacks=[keep]).collect()
print(evaluate(pd.concat(log), "uniform", client="visit"))
