"""Our numbers beside what the paper says in words: agrees, disagrees, or cannot be told from these seeds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedbandit.experiments.catalogue import Above, Alike, Figure
from fedbandit.experiments.comparison import Curves, paired_difference, table

_SURE = 2.0  # standard errors
_ALIKE = 0.05  # what "nearly identical" allows, relative to the larger reward


@dataclass(frozen=True)
class Verdict:
    """A claim of the paper and what came out here: a difference of final rewards, with its standard error."""

    claim: str
    words: str
    difference: float
    error: float
    verdict: Literal["agrees", "disagrees", "not clear"]


def judge(claim: Above | Alike, curves: Mapping[str, Curves]) -> Verdict:
    """Whether the seeds bear a claim out; differences within two standard errors decide nothing."""
    if isinstance(claim, Above):
        difference, error = paired_difference(curves[claim.higher], curves[claim.lower])
        text = f"{claim.higher} above {claim.lower}"
        sure = np.isfinite(error) and abs(difference) > _SURE * error
        verdict = ("agrees" if difference > 0 else "disagrees") if sure else "not clear"
    else:
        difference, error = paired_difference(curves[claim.one], curves[claim.other])
        text = f"{claim.one} about as {claim.other}"
        ends = [member.final.mean() for member in (curves[claim.one], curves[claim.other]) if len(member.final)]
        allowed = _ALIKE * max(ends, default=float("nan"))
        slack = _SURE * error if np.isfinite(error) else float("inf")
        verdict = "not clear"
        if abs(difference) + slack <= allowed:
            verdict = "agrees"
        elif abs(difference) - slack > allowed:
            verdict = "disagrees"
    return Verdict(text, claim.words, difference, error, verdict)  # type: ignore[arg-type]


def beside_the_paper(figure: Figure, curves: Mapping[str, Curves]) -> str:
    """The table of final rewards, the paper's stated numbers where it states any, and a verdict on each claim."""
    lines = [table(curves, "member")]
    if figure.stated:
        lines.append("\nstated in the paper's text (its data, tuned rates):")
        for label, value in figure.stated.items():
            ours = curves[label].final
            lines.append(f"  {label}: {value:.2f} there, {ours.mean():.4f} here" if len(ours) else f"  {label}: -")
    if figure.shows == "trials":
        for label, member in curves.items():
            spread = member.final.std(ddof=1) / member.final.mean() if len(member.final) > 1 else float("nan")
            lines.append(f"\n{label}: the trials' standard deviation is {100 * spread:.2f}% of the final reward")
            lines.append('  the paper: "the variation in rewards across repeated trials is negligible"')
    judged = [judge(claim, curves) for claim in figure.claims]
    if judged:
        width = max(len(verdict.claim) for verdict in judged)
        lines.append("\nthe paper's orderings (difference ± standard error over seeds, paired):")
        lines += [
            f"  {v.claim:<{width}}  {v.difference:+8.4f} ± {v.error:.4f}  {v.verdict:<9}  ({v.words})" for v in judged
        ]
    return "\n".join(lines)
