"""Our numbers beside what the paper says in words: agrees, disagrees, or cannot be told from these seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fedbandit.experiments.catalogue import Above, Alike, Figure
from fedbandit.experiments.comparison import Curves, paired_difference, table

_SURE = 2.0  # standard errors
_OFTEN = "the absolute performance of all the methods improves"
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


def improvement(label: str, often: Curves, seldom: Curves) -> Verdict:
    """The paper says that every method ends higher where models are deployed more often."""
    found = judge(Above("often", "seldom", _OFTEN), {"often": often, "seldom": seldom})
    return replace(found, claim=f"{label} above {label} every 200 rounds")


def epsilons_in_words(epsilons: Mapping[str, float | None], stated: Mapping[str, float]) -> str:
    """What each private member has spent here, beside what the paper states for its own population."""
    lines = ["epsilon (RDP) of the released weights, for the clients of this data set:"]
    for label, epsilon in epsilons.items():
        there = f"; the paper states {stated[label]:g} for its 342,477 users" if label in stated else ""
        lines.append(f"  {label}: {'none' if epsilon is None else f'{epsilon:.4g}'}{there}")
    return "\n".join(lines)


def beside_the_paper(figure: Figure, curves: Mapping[str, Curves], judged: Sequence[Verdict]) -> str:
    """The table of final rewards, the paper's stated numbers where it states any, and the verdicts on its claims."""
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
    if judged:
        width = max(len(verdict.claim) for verdict in judged)
        lines.append("\nthe paper's orderings (difference ± standard error over seeds, paired):")
        lines += [
            f"  {v.claim:<{width}}  {v.difference:+8.4f} ± {v.error:.4f}  {v.verdict:<9}  ({v.words})" for v in judged
        ]
    return "\n".join(lines)
