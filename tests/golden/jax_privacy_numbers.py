"""Print what jax-privacy computes for the cases that our own numbers are held against, as JSON.

Needs an interpreter with jax-privacy 2.0.0 (`pip install jax-privacy==2.0.0` into an environment of its own).
"""

import json
import sys

import dp_accounting
import jax
import numpy as np
from jax_privacy import auditing, batch_selection
from jax_privacy.experimental import execution_plan
from jax_privacy.matrix_factorization import buffered_toeplitz, toeplitz

AMPLIFIED = (  # population, cohort, rounds, bands, accountant (PLD takes minutes here)
    (342_477, 64, 1600, 32, "rdp"),
    (342_477, 64, 1600, 32, "pld"),
    (342_477, 6400, 800, 8, "rdp"),
    (2000, 50, 400, 16, "rdp"),
)
BUFFERED = ((1600, 1600, 2), (1600, 100, 2), (400, 100, 3))  # rounds, separation, buffers
BANDED = ((200, 16),)
ONE_RUN = ((1000, 200, 180), (1000, 1000, 650), (5000, 300, 300))  # canaries, guesses, right ones
EPSILON, DELTA, MISTAKE = 4.0, 1e-6, 1e-3


def accountant(name):
    """RDP by adding or removing one, PLD by zeroing one out: the relations under which each is exact."""
    if name == "rdp":
        return dp_accounting.rdp.RdpAccountant(), batch_selection.PartitionType.INDEPENDENT
    relation = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    return dp_accounting.pld.PLDAccountant(relation), batch_selection.PartitionType.EQUAL_SPLIT


def amplified(population, cohort, rounds, bands, name):
    by, partition = accountant(name)
    config = execution_plan.BandMFExecutionPlanConfig(
        iterations=rounds,
        strategy=np.ones(bands),
        epsilon=EPSILON,
        delta=DELTA,
        sampling_prob=cohort * bands / population,
        partition_type=partition,
        accountant=by,
    )
    return float(config.plan.dp_event.event.event.noise_multiplier)


def once():
    """The noise multiplier of one Gaussian release."""
    return float(
        dp_accounting.calibrate_dp_mechanism(
            dp_accounting.pld.PLDAccountant, dp_accounting.GaussianDpEvent, EPSILON, DELTA
        )
    )


def buffered(rounds, separation, buffers):
    loss = buffered_toeplitz.LossFn.build_min_sep(
        rounds, "mean", separation, -(-rounds // separation)
    )
    _, found = buffered_toeplitz.optimize_loss(loss, num_buffers=buffers)
    return float(np.sqrt(found))


def banded(rounds, bands):
    coefficients = toeplitz.optimize_banded_toeplitz(n=rounds, bands=bands, max_optimizer_steps=250)
    return float(np.sqrt(toeplitz.loss(strategy_coef=coefficients, n=rounds, reduction_fn=np.mean)))


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    json.dump(
        {
            "amplified noise multiplier": [[*case, amplified(*case)] for case in AMPLIFIED],
            "noise multiplier of one release": once(),
            "prefix error of blt": [[*case, buffered(*case)] for case in BUFFERED],
            "prefix error of banded": [[*case, banded(*case)] for case in BANDED],
            "one run": [
                [*case, float(auditing._epsilon_one_run(0.0, *case, MISTAKE, DELTA))]
                for case in ONE_RUN
            ],
        },
        sys.stdout,
        indent=1,
    )
    print()
