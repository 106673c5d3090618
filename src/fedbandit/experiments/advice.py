"""A tournament in words: a short recommendation for a practitioner, with the evidence and how sure it is."""

from collections.abc import Mapping

from fedbandit.data.info import describe
from fedbandit.experiments.comparison import Curves, paired_difference, standard_error
from fedbandit.experiments.tournament import EXPLORERS, Tournament

_SURE = 2.0  # standard errors


def recommendation(held: Tournament) -> str:
    """The recommendation as Markdown."""
    config = held.configs[held.chosen]
    rates = (
        f"client learning rate {config.client.learning_rate:g}, server learning rate {config.server.learning_rate:g}"
    )
    exploration = " ".join(f"{key} {value:g}" for key, value in config.policy.parameters.items())
    lines = [
        f"# Advice for {held.dataset.header.name}",
        "",
        f"- **Is exploration worth it here?** {_worth(held.curves)}",
        f"- **Which rule?** {_rule(held)}",
        f"- **Which parameters?** {exploration + ', ' if exploration else ''}{rates}, server optimiser"
        f" {config.server.optimizer}.",
        f"- **How often to deploy?** {_deploying(held.periods)}",
        f"- **What does privacy cost?** {_privacy(held)}",
        f"- **How sure is this?** {_sureness(held)}",
        "",
        "## Evidence",
        "",
        f"Scenario `{config.scenario}`, {config.rounds} rounds of {config.clients_per_round} clients, deploying every"
        f" {config.deploy_every}; running average reward, mean ± standard error over seeds.",
        "",
        _table("policy", held.curves),
        "",
        _table("deploying every", {f"{every} rounds": curves for every, curves in sorted(held.periods.items())}),
        "",
        "```",
        describe(held.dataset),
        "```",
        "",
    ]
    return "\n".join(lines)


def _worth(curves: Mapping[str, Curves]) -> str:
    explorers = {name: curves[name] for name in EXPLORERS if len(curves[name].final)}
    if not explorers or not len(curves["greedy"].final):
        return "Cannot be said: the runs that would show it diverged."
    best = max(explorers, key=lambda name: explorers[name].final.mean())
    difference, error = paired_difference(curves[best], curves["greedy"])
    amount = f"{best} ends {abs(difference):.4f} ± {error:.4f} {'above' if difference > 0 else 'below'} greedy"
    if difference > _SURE * error:
        return f"Yes: {amount}."
    if difference < -_SURE * error:
        return f"No: {amount}."
    return f"Not clearly: {amount}."


def _rule(held: Tournament) -> str:
    chosen = held.curves[held.chosen]
    others = {n: c for n, c in held.curves.items() if n not in (held.chosen, "baseline") and len(c.final)}
    text = f"**{held.chosen}**, {chosen.final.mean():.4f} ± {standard_error(chosen.final):.4f}."
    told = []
    for name, curves in sorted(others.items(), key=lambda item: -item[1].final.mean()):
        difference, error = paired_difference(chosen, curves)
        clear = "" if abs(difference) > _SURE * error else ", not clear"
        told.append(f"{name} {'-' if difference > 0 else '+'}{abs(difference):.4f} ± {error:.4f}{clear}")
    return f"{text} The others, against it: {'; '.join(told)}." if told else text


def _deploying(periods: Mapping[int, Curves]) -> str:
    ended = {every: curves for every, curves in sorted(periods.items()) if len(curves.final)}
    best = max(ended, key=lambda every: ended[every].final.mean())
    longest = best
    for every, curves in ended.items():
        difference, error = paired_difference(ended[best], curves)
        if every > longest and not difference > _SURE * error:
            longest = every
    told = ", ".join(f"{curves.final.mean():.4f} every {every} rounds" for every, curves in ended.items())
    if longest != best:
        return f"Every {longest} rounds is enough; more often gains nothing that could be measured ({told})."
    return f"Every {best} rounds is best of those tried ({told})."


def _privacy(held: Tournament) -> str:
    if not held.private:
        return held.private_note or "Not asked for."
    told = []
    for epsilon, curves in held.private.items():
        if not len(curves.final):
            told.append(f"epsilon {epsilon:g}: every run diverged")
            continue
        difference, error = paired_difference(curves, held.curves[held.chosen])
        share = 100 * difference / held.curves[held.chosen].final.mean()
        told.append(f"epsilon {epsilon:g}: {difference:+.4f} ± {error:.4f} ({share:+.1f}%)")
    return (
        f"{'; '.join(told)} of reward ({held.private_note}). With few clients noise weighs heavily; with ten times the"
        " clients a round it would weigh a tenth. Looking at the data for this advice has itself spent privacy that no"
        " epsilon counts."
    )


def _sureness(held: Tournament) -> str:
    seeds = len(held.curves[held.chosen].seeds)
    shortened = (
        f"The runs are shortened to {held.scale:.2g} of the paper's length, which favours little exploration and high"
        " rates; a longer budget brings the truth nearer. "
        if held.scale < 1
        else ""
    )
    tried = ", ".join(f"{name} {count}" for name, count in held.tries.items())
    return (
        f"{seeds} seeds each; differences are paired by seed, and one within two standard errors counts as not clear."
        f" Pairs of learning rates that were tried, on a seed of their own: {tried}. Exploration parameters are the"
        f" paper's, not tuned here. {shortened}"
        f"Took {held.minutes:.1f} minutes; everything is in {held.folder}."
    )


def _table(first: str, curves: Mapping[str, Curves]) -> str:
    rows = [f"| {first} | reward | ± s.e. | seeds | diverged |", "| --- | ---: | ---: | ---: | ---: |"]
    for label, member in curves.items():
        final = member.final
        numbers = f"{final.mean():.4f} | {standard_error(final):.4f}" if len(final) else "– | –"
        rows.append(f"| {label} | {numbers} | {len(member.seeds)} | {len(member.diverged)} |")
    return "\n".join(rows)
