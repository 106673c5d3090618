"""Audits in full counts: violations caught and right rounds blamed, as a committed JSON file.

    python scripts/audit_counts.py scripts/results/audit_counts.json

Resumes what an earlier call has begun. Every violation is in real parts of rounds, which
`tests/helpers/audit_violations.py` replaces; its case alone is audited, against a stricter bound
than in the whole audit. Tests run samples of the same.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
from audit_violations import VIOLATIONS

from fedbandit.studies.privacy_audit import LEVEL, TARGETS, audit, default_cases

FULL, REDUCED = 40, 1000


def jobs() -> Iterator[tuple[str, int]]:
    """What is counted, a few seeds of everything at a time."""
    names = [f"{name} ({target})" for name, one in VIOLATIONS.items() for target in one.targets]
    for start in range(0, FULL, 10):
        for name in [*names, "right rounds, full audit"]:
            yield from ((name, seed) for seed in range(start, start + 10))
        reduced = range(start * REDUCED // FULL, (start + 10) * REDUCED // FULL)
        yield from (("right rounds, reduced audit", seed) for seed in reduced)


def verdicts(name: str, seed: int) -> set[str]:
    """The verdicts of one audit."""
    cases = default_cases()
    if name == "right rounds, full audit":
        return {one.verdict for one in audit(seed=seed)}
    if name == "right rounds, reduced audit":
        case, target = list(cases)[seed % len(cases)], TARGETS[seed // len(cases) % 3]
        if case == "banded-mf" and target == "deployment":
            target = "simulation"
        return {one.verdict for one in audit({case: cases[case]}, [target], seed=seed, weights=500)}
    violation, _, target = name.rstrip(")").rpartition(" (")
    one = VIOLATIONS[violation]
    with one():
        found = audit({one.case: cases[one.case]}, [target], seed=seed, level=LEVEL / 20)
    return {each.verdict for each in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long")
    given = parser.parse_args()
    counts = json.loads(given.out.read_text()) if given.out.exists() else {}
    began = time.monotonic()
    for name, seed in jobs():
        kept = counts.setdefault(name, {"audits": 0, "violated": 0, "cannot tell": 0})
        if seed < kept["audits"]:
            continue
        if time.monotonic() - began > given.seconds:
            return
        found = verdicts(name, seed)
        kept["audits"] += 1
        for verdict in ("violated", "cannot tell"):
            kept[verdict] += verdict in found
        given.out.write_text(json.dumps(counts, indent=1) + "\n")


if __name__ == "__main__":
    main()
