"""`fedbandit theory` and `fedbandit regret`: the cost of delay in bounds and measurements, and the regret of a run."""

from pathlib import Path
from typing import Annotated

import typer


def theory(
    out: Annotated[Path, typer.Option("--out", "-o", help="The picture to write (.png or .svg).")] = Path("theory.png"),
    rounds: Annotated[int, typer.Option(help="Number of rounds of every run.")] = 600,
    every: Annotated[str, typer.Option(help="Rounds between deployments, separated by commas.")] = (
        "1,5,20,60,120,200,300,600"
    ),
    seeds: Annotated[int, typer.Option(help="Number of runs for each deployment period.")] = 3,
    epsilon: Annotated[float, typer.Option(help="The ε of ε-greedy.")] = 0.1,
    gamma: Annotated[float, typer.Option(help="The γ of FALCON; its μ is the number of actions.")] = 100.0,
    log_class: Annotated[float, typer.Option(help="The ln|F| of the bounds; 45 is one nat per weight.")] = 45.0,
    delta: Annotated[float, typer.Option(help="The probability that the bounds fail.")] = 0.05,
) -> None:
    """Compare regret bounds with the regret that is measured.

    Draws federated and centralised bounds, and the regret in a simulation whose best policy is known.
    """
    from fedbandit.core.errors import ConfigError
    from fedbandit.evaluation.theory import longest_useful_period
    from fedbandit.policies import Falcon
    from fedbandit.results.plots import require_picture
    from fedbandit.studies.delay import BOUNDS_HEADING, HEADING, DelayStudy, draw, run_study

    require_picture(out)
    try:
        periods = [int(part) for part in every.split(",")]
    except ValueError:
        raise ConfigError(f"--every: expected whole numbers separated by commas, not {every!r}") from None
    if seeds < 1 or any(not 1 <= period <= rounds for period in periods):
        raise ConfigError(f"--every, --seeds: periods must lie between 1 and {rounds}, and seeds must be at least 1")
    study = DelayStudy(rounds, periods, seeds, epsilon, gamma, log_class, delta)
    try:
        setting, _ = study.setting(), Falcon(gamma=gamma)
    except ValueError as error:
        raise ConfigError("--" + str(error).replace("log_class", "log-class")) from None
    print(HEADING)
    rows = run_study(study, lambda row: print(row.line(), flush=True))
    print(BOUNDS_HEADING)
    for row in rows:
        print(row.bounds_line())
    per_round = rows[0].samples // rows[0].deploy_every
    longest = longest_useful_period(setting, per_round * rounds)
    if longest is None:
        print("even with a perfect oracle the federated bound is vacuous for every period")
    else:
        print(f"with a perfect oracle the federated bound is vacuous beyond {longest / per_round:g} rounds a period")
    print("constants are dropped: compare shapes, not heights")
    print(draw(study, rows, out))


def regret(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    data: Annotated[str | None, typer.Option(help="The data set.", show_default="the run's")] = None,
    rounds: Annotated[int, typer.Option(help="Rounds of full-information training for the best policy.")] = 200,
    learning_rate: Annotated[
        float | None,
        typer.Option(help="Client learning rate of that training.", show_default="that of pre-training"),
    ] = None,
) -> None:
    """Estimate the regret of a run against the best policy.

    This is the federated regret (eq. 4 of the paper) of the run's policy with its newest model, against the best
    policy of the same class.
    """
    from contextlib import closing

    from fedbandit.building.experiment import build_experiment
    from fedbandit.config import Config, read_toml
    from fedbandit.core.errors import DataError
    from fedbandit.data import open_dataset
    from fedbandit.engines import ThreadEngine
    from fedbandit.studies.regret import best_in_class, estimated_regret
    from fedbandit.studies.scoring import newest_state

    if not (run / "config.toml").exists():
        raise DataError(f"{run}: not a run folder (no config.toml)")
    config = Config.build(read_toml(run / "config.toml"), where=f"{run / 'config.toml'}: ")
    experiment = build_experiment(config, open_dataset(data or config.data.source))
    reached = newest_state(run)
    now = max(1, reached.round)  # the world may have changed on the way there
    with closing(ThreadEngine(None if config.threads == "auto" else config.threads)) as engine:
        best = best_in_class(experiment, engine, rounds=rounds, round_number=now, client_learning_rate=learning_rate)
    found = estimated_regret(experiment, reached.weights, best, round_number=now, events=reached.events)
    print(f"best of the class {found.best:.4f}, ours {found.ours:.4f}: regret {found.value:.4f} per event")
    print("averaged over clients, each counting the same; the best is by full-information training on their data")
    if found.reference_beaten:
        print("note: ours earned more than full-information training found; give it more rounds or another rate")
