"""`fedbandit drift`: policies in a world that changes. A thin skin over `fedbandit.experiments.drift`."""

from pathlib import Path
from typing import Annotated

import typer


def drift(
    kind: Annotated[str, typer.Option(help="permute (labels), appear (actions), or rotate (preferences).")] = "permute",
    data: Annotated[str, typer.Option(help="A data set folder, or an embedded set: glyphs, topics.")] = "topics",
    at: Annotated[str, typer.Option(help="The rounds before which the world changes, separated by commas.")] = "200",
    rounds: Annotated[int, typer.Option(help="Rounds of each run.")] = 400,
    deploy_every: Annotated[int, typer.Option(help="Rounds between deployments.")] = 10,
    policies: Annotated[str, typer.Option(help="Which, separated by commas.")] = "greedy,epsilon-greedy,softmax,falcon",
    seeds: Annotated[int, typer.Option(help="Runs of each policy.")] = 3,
    settings: Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Set any value.")] = [],  # noqa: B006
    out: Annotated[Path, typer.Option("--out", "-o", help="The picture to make (.png or .svg).")] = Path("drift.png"),
) -> None:
    """How far each policy falls when the world changes, and how soon it recovers: a table and a picture.

    Stopped and given again, the same command goes on.
    """
    from itertools import pairwise

    from fedbandit.config import parse_settings
    from fedbandit.data import open_dataset
    from fedbandit.errors import ConfigError
    from fedbandit.experiments.comparison import telling
    from fedbandit.experiments.drift import DriftStudy, draw, members, play, table
    from fedbandit.experiments.plots import require_picture
    from fedbandit.experiments.sweeps import name_of

    try:
        changes = tuple(int(part) for part in at.split(","))
    except ValueError:
        raise ConfigError(f"--at: expected whole numbers separated by commas, not {at!r}") from None
    study = DriftStudy(
        data=data,
        kind=kind,
        rounds=rounds,
        at=changes,
        deploy_every=deploy_every,
        policies=[name.strip() for name in policies.split(",") if name.strip()],
        seeds=seeds,
        settings=tuple(parse_settings(settings).items()),
    )
    if not study.policies:
        raise ConfigError("--policies: name one at least")
    edges = [1, *changes, rounds + 1]
    if seeds < 1 or any(later - earlier < study.window for earlier, later in pairwise(edges)):
        raise ConfigError(f"--at, --rounds: leave at least {study.window} rounds before, between and after changes")
    require_picture(out)
    names = {policy: name_of(policy, config) for policy, config in members(study).items()}
    runs = out.with_name(f"{out.stem}-runs")
    outcomes = play(
        study,
        lambda policy, seed: runs / names[policy] / f"seed-{seed}",
        on_end=telling(lambda text: typer.echo(text, err=True)),
    )
    typer.echo(table(study, outcomes))
    title = {"permute": "Labels trade places", "appear": "New actions appear", "rotate": "Preferences rotate"}
    shown = f"{title.get(kind, kind)} ({open_dataset(data).header.name}, {seeds} seeds)"
    typer.echo(f"{draw(study, outcomes, out, shown)}; runs: {runs}")
