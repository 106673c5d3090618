"""How often audits find half the noise of every mechanism, and how often they blame the right noise.

`python -m benchmarks.audit_power 100` prints the table of docs/privacy.md: 2,800 audits.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fedbandit.federated.pipeline import AdaptiveClipping
from fedbandit.privacy.plan import PrivacyPlan
from fedbandit.privacy.strategies import Tree, best_banded, best_blt
from fedbandit.studies.privacy_audit import SHORT, Source, audit


def table_plans() -> dict[str, PrivacyPlan]:
    """One plan of every mechanism, small enough to audit hundreds of times."""
    apart = {"sampling": "min-separation", "separation": 4}
    base = {"population": 240, "clients_per_round": 24, "rounds": 16, "delta": 1e-5}

    def plan(**changes: object) -> PrivacyPlan:
        return PrivacyPlan(**{**base, **changes})  # type: ignore[arg-type]

    return {
        "dp-fedavg (poisson)": plan(noise_multiplier=1.0),
        "dp-fedavg (fixed)": plan(noise_multiplier=4.0, sampling="fixed"),
        "dp-fedavg (fixed), adaptive clipping": plan(
            noise_multiplier=1.5, sampling="fixed", clipping=AdaptiveClipping(0.5, 0.1), rounds=4
        ),
        "dp-ftrl (min-separation)": plan(noise_multiplier=6.0, strategy=Tree(), **apart),
        "banded-mf (min-separation)": plan(
            noise_multiplier=2.0, strategy=best_banded(16, 4), **apart
        ),
        "banded-mf (cyclic-poisson)": plan(
            noise_multiplier=1.0,
            strategy=best_banded(16, 4),
            sampling="cyclic-poisson",
            separation=4,
        ),
        "blt (min-separation)": plan(noise_multiplier=3.0, strategy=best_blt(16, 4, 2), **apart),
    }


@dataclass(frozen=True)
class AuditRow:
    """How often audits of one mechanism came to which verdict."""

    mechanism: str
    source: Source
    trials: int
    caught: float  # share of audits that found half the noise
    blamed: float  # share of audits that blamed the right noise


def audit_table(
    repetitions: int, sources: tuple[Source, ...] = ("simulation", "deployment")
) -> Iterator[AuditRow]:
    """Audit every mechanism many times, with half the noise and with all of it."""
    for name, plan in table_plans().items():
        for source in sources:
            shares = []
            for actual in (SHORT, 1.0):
                found = [
                    audit(plan, source, actual=actual, seed=seed) for seed in range(repetitions)
                ]
                shares.append(
                    float(
                        np.mean([any(one.verdict == "violated" for one in each) for each in found])
                    )
                )
            yield AuditRow(name, source, max(one.needed for one in found[0]), *shares)


if __name__ == "__main__":
    print("| mechanism | noise of | planted clients | half the noise caught | right noise blamed |")
    print("| --- | --- | --- | --- | --- |")
    for row in audit_table(int(sys.argv[1]) if len(sys.argv) > 1 else 100):
        shares = f"{row.caught:.1%} | {row.blamed:.1%}"
        print(f"| {row.mechanism} | {row.source}s | {row.trials} | {shares} |", flush=True)
