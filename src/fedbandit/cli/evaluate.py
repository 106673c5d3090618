"""`fedbandit evaluate`, `train-offline`, `tune`, `theory` and `regret`: a thin layer over `fedbandit.studies`."""

from pathlib import Path
from typing import Annotated, Any

import typer

Settings = Annotated[
    list[str],
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Set any value of the configuration; repeatable."
    ),
]


What = Annotated[str, typer.Argument(metavar="NAME_OR_TOML", help="A preset or a TOML file.")]


def evaluate(
    logs: Annotated[
        Path,
        typer.Argument(help="A .csv, .tsv or .parquet file of decisions, or a logged data set."),
    ],
    policy: Annotated[
        str | None,
        typer.Option(
            help="The policy to evaluate: uniform, constant, greedy, epsilon-greedy, softmax, falcon or"
            " my_module:MyPolicy.",
            show_default="uniform",
        ),
    ] = None,
    parameters: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A parameter of the policy, such as epsilon=0.1; repeatable.",
        ),
    ] = [],  # noqa: B006 - typer's way to say "repeatable"
    model: Annotated[
        Path | None,
        typer.Option(help="A run folder or model file that gives the policy its scores."),
    ] = None,
    reward_model: Annotated[
        str,
        typer.Option(
            help="The reward model of dm and dr: linear (in the context), actions (the mean of each), a run folder or a"
            " model file; auto is linear if there are contexts."
        ),
    ] = "auto",
    target: Annotated[
        str | None,
        typer.Option(
            help="A column with the policy's probability of the logged action, instead of --policy."
        ),
    ] = None,
    estimators: Annotated[
        str,
        typer.Option(
            help="Estimators, separated by commas: ips,snips,dm,dr,switch.",
            show_default="all that apply",
        ),
    ] = "",
    clip: Annotated[
        float | None, typer.Option(help="Clip importance weights at this value.")
    ] = None,
    shrink: Annotated[
        float | None,
        typer.Option(help="Shrink importance weights w to L·w / (w² + L) with this L."),
    ] = None,
    switch: Annotated[
        float | None, typer.Option(help="The largest weight that switch uses.", show_default="10")
    ] = None,
    confidence: Annotated[float, typer.Option(help="Confidence level of the intervals.")] = 0.95,
    interval: Annotated[
        str,
        typer.Option(
            help="Kind of interval, over clients: bootstrap, or bernstein (wider, always holds)."
        ),
    ] = "bootstrap",
    reward_range: Annotated[
        str | None,
        typer.Option(help="LOW,HIGH between which rewards lie.", show_default="as in the log"),
    ] = None,
    floor: Annotated[
        float | None,
        typer.Option(help="The smallest possible propensity.", show_default="as in the log"),
    ] = None,
    estimate_propensities: Annotated[
        bool,
        typer.Option(
            "--estimate-propensities", help="Estimate propensities from the log; intervals widen."
        ),
    ] = False,
    client: Annotated[
        str | None,
        typer.Option(help="The column with the client id.", show_default="every row is a client"),
    ] = None,
    action: Annotated[str, typer.Option(help="The column with the action.")] = "action",
    reward: Annotated[str, typer.Option(help="The column with the reward.")] = "reward",
    propensity: Annotated[
        str, typer.Option(help="The column with the probability of the action.")
    ] = "propensity",
    available: Annotated[
        str | None, typer.Option(help="The column with the available actions.")
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="The split of a data set: test or train.", show_default="test, held out"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the bootstrap.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Estimate a policy's reward from the log of another policy.

    Prints estimates with intervals, and warnings where the log says little.
    """
    from fedbandit.config import parse_settings
    from fedbandit.evaluation.ope.logs import LogColumns
    from fedbandit.studies.evaluate import EvaluationRequest, evaluate_logs

    request = EvaluationRequest(
        policy=policy,
        parameters=parse_settings(parameters),
        model=model,
        reward_model=reward_model,
        estimators=[name.strip() for name in estimators.split(",") if name.strip()],
        clip=clip,
        shrink=shrink,
        switch=switch,
        estimate_propensities=estimate_propensities,
        confidence=confidence,
        interval=_one_of("interval", interval, ("bootstrap", "bernstein")),
        reward_range=_range(reward_range),
        floor=floor,
        seed=seed,
        split=None if split is None else _one_of("split", split, ("train", "test")),
        columns=LogColumns(
            action=action,
            reward=reward,
            propensity=propensity,
            client=client,
            target=target,
            available=available,
        ),
    )
    _report(evaluate_logs(logs, request), as_json)


def train_offline(
    logs: Annotated[
        Path, typer.Argument(help="A data set made by `fedbandit data import logged`.")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The model file to write (.safetensors).")
    ],
    what: Annotated[
        str | None,
        typer.Option("--config", help="A preset or TOML file.", show_default="linear model"),
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            help="The objective: regression, weighted-regression, doubly-robust and others.",
            show_default="the configuration's",
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(help="Number of training rounds.", show_default="the configuration's, or 100"),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite an existing model file.")
    ] = False,
    settings: Settings = [],  # noqa: B006
) -> None:
    """Train a model from logged feedback, federated and off-policy.

    `fedbandit evaluate --model` reads the resulting file.
    """
    from dataclasses import replace

    from fedbandit.config import Config, parse_settings
    from fedbandit.core.errors import ConfigError
    from fedbandit.core.files import write_bytes
    from fedbandit.data import open_dataset
    from fedbandit.deploy.device.model_files import DeviceModel
    from fedbandit.presets import load
    from fedbandit.studies.offline import train_from_logs
    from fedbandit.studies.scoring import trained_on

    dataset = open_dataset(logs)
    size = min(64, dataset.train.num_clients)
    config = (
        Config.build({"rounds": 100, "clients_per_round": size}) if what is None else load(what)
    )
    named = {"objective.name": objective, "rounds": rounds}
    config = config.with_values({key: value for key, value in named.items() if value is not None})
    config = config.with_values(parse_settings(settings))
    if out.suffix != ".safetensors":
        raise ConfigError(f"--out: {out} must end in .safetensors")
    if out.exists() and not force:
        raise ConfigError(f"{out}: already exists; use another name, or --force to overwrite it")
    trained = train_from_logs(config, dataset)
    model = DeviceModel.of_experiment(trained.experiment, trained.weights, version=0)
    model = replace(model, trained_on=trained_on(dataset))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(out, model.to_bytes())
    clients, events = dataset.train.num_clients, dataset.train.num_examples
    print(
        f"{config.objective.name}: {config.rounds} rounds on {events} events of {clients} clients"
    )
    if dataset.test is None or not dataset.test.num_examples:
        print(
            "No client is held out to evaluate it on; `fedbandit data import logged --test-fraction` holds some out"
        )
        return
    held_out = dataset.test.num_clients
    print(f"Evaluate it on the {held_out} clients that were held out:")
    print(
        f"fedbandit evaluate {logs} --split test --policy epsilon-greedy --set epsilon=0.1 --model {out}"
    )


def tune(
    what: What,
    data: Annotated[
        str | None, typer.Option(help="A data set folder, or the embedded glyphs or topics.")
    ] = None,
    server: Annotated[
        str, typer.Option(help="Server learning rates, separated by commas.")
    ] = "0.005,0.02,0.05",
    client: Annotated[
        str, typer.Option(help="Client learning rates, separated by commas.")
    ] = "0.1,0.5,2",
    explore: Annotated[
        str | None,
        typer.Option(
            help="Values of epsilon, beta or gamma, separated by commas.",
            show_default="around the configuration's",
        ),
    ] = None,
    estimator: Annotated[str, typer.Option(help="The estimator: ips, snips or dr.")] = "snips",
    cost: Annotated[
        float, typer.Option(help="Share of the reward that more exploration may cost.")
    ] = 0.05,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Run every candidate and compare.")
    ] = True,
    seeds: Annotated[
        int, typer.Option(help="Number of seeds of that comparison; none of them made the log.")
    ] = 2,
    settings: Settings = [],  # noqa: B006
) -> None:
    """Choose learning rates and exploration from logs.

    Simulates one deployment period, evaluates the candidates on its log, and compares the choice with the best.
    """
    from contextlib import closing

    from fedbandit.config import parse_settings
    from fedbandit.core.errors import ConfigError
    from fedbandit.data import open_dataset
    from fedbandit.engines import ThreadEngine
    from fedbandit.presets import load
    from fedbandit.studies.tuning import check as run_all
    from fedbandit.studies.tuning import exploration_around, verdict
    from fedbandit.studies.tuning import tune as choose

    config = load(what).with_values(parse_settings(settings))
    if data is not None:
        config = config.with_values({"data.source": data})
    if check and seeds < 1:
        raise ConfigError(
            f"--seeds: the comparison needs at least 1, not {seeds}; use --no-check to skip it"
        )
    dataset = open_dataset(config.data.source)
    with closing(ThreadEngine(None if config.threads == "auto" else config.threads)) as engine:
        tuned = choose(
            config,
            dataset,
            server_rates=_numbers("server", server),
            client_rates=_numbers("client", client),
            exploration=exploration_around(config)
            if explore is None
            else _numbers("explore", explore),
            engine=engine,
            estimator=_one_of("estimator", estimator, ("ips", "snips", "dr")),
            cost=cost,
        )
        print(f"{tuned.events} events logged in one period earned {tuned.logged_reward:.4f}")
        found = None
        if check:
            apart = range(config.seed + 1, config.seed + 1 + seeds)
            found = run_all(config, dataset, tuned, seeds=apart, engine=engine, cost=cost)
    for number, candidate in enumerate(tuned.candidates):
        what_is = "  ".join(f"{key}={value:g}" for key, value in candidate.settings.items())
        measured = f"  run {found.rewards[number]:.4f}" if found else ""
        mark = "  <- chosen" if candidate is tuned.chosen else ""
        print(
            f"{candidate.estimate.value:.4f} ±{candidate.estimate.standard_error:.4f}{measured}  {what_is}{mark}"
        )
    for warning in tuned.chosen.estimate.warnings:
        print(f"warning: {warning}")
    for line in verdict(tuned, found):
        print(line)


def _numbers(option: str, text: str) -> list[float]:
    from fedbandit.core.errors import ConfigError

    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--{option}: expected numbers separated by commas, not {text!r}"
        ) from None


def _one_of(option: str, value: str, known: tuple[str, ...]) -> Any:
    from fedbandit.core.errors import ConfigError

    if value not in known:
        raise ConfigError(f"--{option}: {value!r} is none of {', '.join(known)}")
    return value


def _range(text: str | None) -> tuple[float, float] | None:
    from fedbandit.core.errors import ConfigError

    if text is None:
        return None
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--reward-range: expected LOW,HIGH, not {text!r}") from None
    return low, high


def _report(evaluation: Any, as_json: bool) -> None:
    from dataclasses import asdict

    from fedbandit.core.files import to_json

    if as_json:
        print(to_json(asdict(evaluation), indent=1))
    else:
        print(evaluation)


def theory(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The picture to write (.png or .svg).")
    ] = Path("theory.png"),
    rounds: Annotated[int, typer.Option(help="Number of rounds of every run.")] = 600,
    every: Annotated[str, typer.Option(help="Rounds between deployments, separated by commas.")] = (
        "1,5,20,60,120,200,300,600"
    ),
    seeds: Annotated[int, typer.Option(help="Number of runs for each deployment period.")] = 3,
    epsilon: Annotated[float, typer.Option(help="The ε of ε-greedy.")] = 0.1,
    gamma: Annotated[
        float,
        typer.Option(help="The γ of FALCON without schedule; its μ is the number of actions."),
    ] = 100.0,
    log_class: Annotated[
        float, typer.Option(help="The ln|F| of the bounds; 45 is one nat per weight.")
    ] = 45.0,
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
        raise ConfigError(
            f"--every: expected whole numbers separated by commas, not {every!r}"
        ) from None
    if seeds < 1 or any(not 1 <= period <= rounds for period in periods):
        raise ConfigError(
            f"--every, --seeds: periods must lie between 1 and {rounds}, and seeds must be at least 1"
        )
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
        print(
            f"with a perfect oracle the federated bound is vacuous beyond {longest / per_round:g} rounds a period"
        )
    print("constants are dropped: compare shapes, not heights")
    print(draw(study, rows, out))


def regret(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    data: Annotated[
        str | None, typer.Option(help="The data set.", show_default="the run's")
    ] = None,
    rounds: Annotated[
        int, typer.Option(help="Rounds of full-information training for the best policy.")
    ] = 200,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            help="Client learning rate of that training.", show_default="that of pre-training"
        ),
    ] = None,
) -> None:
    """Estimate the regret of a run against the best policy.

    This is the federated regret (eq. 4 of the paper) of the run's policy with its newest model, against the best
    policy of the same class.
    """
    from contextlib import closing

    from fedbandit.assembly.experiment import build_experiment
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
        best = best_in_class(
            experiment, engine, rounds=rounds, round_number=now, client_learning_rate=learning_rate
        )
    found = estimated_regret(
        experiment, reached.weights, best, round_number=now, events=reached.events
    )
    print(
        f"best of the class {found.best:.4f}, ours {found.ours:.4f}: regret {found.value:.4f} per event"
    )
    print(
        "averaged over clients, each counting the same; the best is by full-information training on their data"
    )
    if found.reference_beaten:
        print(
            "note: ours earned more than full-information training found; give it more rounds or another rate"
        )
