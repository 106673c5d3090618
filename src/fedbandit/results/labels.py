"""Which runs are of one configuration, and what to call each configuration: as few values as tell it apart.

Knows configurations as plain values, nested as in a run folder's `config.toml`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fedbandit.core.parts import WHERE_COMPUTED, flatten, in_short
from fedbandit.results.plots import COLOURS, policy_of

_TELLING = (
    "scenario",
    "mode",
    "deploy_every",
    "data.",
    "model.",
    "objective.",
    "server.optimizer",
    "privacy.",
    "policy.",
)


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a run the run it is, by dotted key; what is not set, and where it is computed, is left out."""
    flat = flatten({key: value for key, value in config.items() if key not in WHERE_COMPUTED})
    return {key: value for key, value in flat.items() if value is not None}


def made_from(environment: Mapping[str, Any]) -> str | None:
    """What beside its configuration a run was made from: data, the user's own source, the results number."""
    fingerprint = environment.get("data_fingerprint")
    rest = {key: environment[key] for key in ("results", "sources") if environment.get(key) not in (None, 1, {})}
    return (
        json.dumps([fingerprint, rest], sort_keys=True) if rest else None if fingerprint is None else str(fingerprint)
    )


def grouped(configs: Sequence[Mapping[str, Any]], data: Sequence[str | None]) -> dict[str, list[int]]:
    """The positions of the runs of each configuration, by label and sorted by seed.

    Runs of one group differ in nothing but their seed; `data` says what else each run was made from (`made_from`).
    """
    groups: dict[str, list[int]] = {}
    settings = [settings_of(config) for config in configs]
    for position, (values, fingerprint) in enumerate(zip(settings, data, strict=True)):
        identity = {key: value for key, value in values.items() if key != "seed"}
        if fingerprint is not None:  # the same data may lie in several places
            identity["data.source"] = fingerprint
        groups.setdefault(json.dumps(identity, sort_keys=True), []).append(position)
    labels = _labels([settings[members[0]] for members in groups.values()])
    order = {name: place for place, name in enumerate(COLOURS)}
    named = sorted(
        zip(labels, groups.values(), strict=True),
        key=lambda group: (order.get(policy_of(group[0]) or "", len(order)), group[0]),
    )
    return {label: sorted(members, key=lambda i: settings[i].get("seed", 0)) for label, members in named}


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values are not the same everywhere; what a reader thinks of first comes first."""
    every = sorted(dict.fromkeys(key for values in settings for key in values), key=_place)
    return [key for key in every if len({json.dumps(values.get(key)) for values in settings}) > 1]


def _labels(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The policy's name (or "baseline"), then the fewest values that tell two of the same name apart."""
    names = [str(values.get("policy.name", "?")) if values.get("training", True) else "baseline" for values in settings]
    keys = {
        name: _telling_apart([values for other, values in zip(names, settings, strict=True) if other == name])
        for name in set(names)
    }
    labels = [
        " ".join([name, *(_said(key, values.get(key)) for key in keys[name])])
        for name, values in zip(names, settings, strict=True)
    ]
    # Of the same settings on other data under the same name nothing but a number is left to say.
    return [
        label if labels.count(label) == 1 else f"{label} ({labels[: i + 1].count(label)})"
        for i, label in enumerate(labels)
    ]


def _telling_apart(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys that together differ between any two; what a reader thinks of first comes first."""
    every = dict.fromkeys(key for values in settings for key in values if key != "seed")
    chosen: list[str] = []
    kinds = [""] * len(settings)
    for key in sorted(every, key=_place):
        finer = [f"{kind}|{values.get(key)!r}" for kind, values in zip(kinds, settings, strict=True)]
        if len(set(finer)) > len(set(kinds)):
            chosen.append(key)
            kinds = finer
    return chosen


def _place(key: str) -> int:
    return next((place for place, start in enumerate(_TELLING) if key.startswith(start)), len(_TELLING))


def _said(key: str, value: Any) -> str:
    """A name says what it is; a number does not."""
    if isinstance(value, str):
        return value
    return f"{key.removeprefix('policy.').replace('learning_rate', 'rate')}={in_short(value)}"
