"""`fedbandit evaluate`, `train-offline`, `export`, `tune`, `theory`, `regret`: a thin layer over
`fedbandit.studies`.
"""

from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

import fedbandit
from fedbandit.cli.help import (
    Answer,
    Engine,
    Folder,
    OwnData,
    Parameters,
    RayAddress,
    Settings,
    What,
    Workers,
    configured,
    numbers,
    parsed_settings,
    runner_of,
)
from fedbandit.core.errors import ConfigError, DataError, refuse
from fedbandit.core.parts import flatten
from fedbandit.core.progress import to_stderr


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
    parameters: Parameters = [],  # noqa: B006 - typer's way to say "repeatable"
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
        Literal["bootstrap", "bernstein"],
        typer.Option(help="Kind of interval, over clients; bernstein is wider, and always holds."),
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
        Literal["train", "test"] | None,
        typer.Option(help="The split of a data set.", show_default="test, held out"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the bootstrap.")] = 0,
) -> Answer:
    """Estimate a policy's reward from the log of another policy.

    Prints estimates with intervals, and warnings where the log says little.
    """
    from fedbandit.studies.evaluate import EvaluationRequest, evaluate_logs

    ends = None if reward_range is None else numbers("reward-range", reward_range)
    refuse(
        (
            ends is not None and len(ends) != 2,
            f"--reward-range: expected LOW,HIGH, not {reward_range!r}",
        )
    )
    request = EvaluationRequest(
        policy=policy,
        parameters=parsed_settings(parameters),
        model=model,
        reward_model=reward_model,
        estimators=[name.strip() for name in estimators.split(",") if name.strip()],
        clip=clip,
        shrink=shrink,
        switch=switch,
        estimate_propensities=estimate_propensities,
        confidence=confidence,
        interval=interval,
        reward_range=None if ends is None else (ends[0], ends[1]),
        floor=floor,
        seed=seed,
        split=split,
        action=action,
        reward=reward,
        propensity=propensity,
        client=client,
        target=target,
        available=available,
    )
    found = evaluate_logs(logs, request)
    rows = [{"estimator": k, **flatten(asdict(one))} for k, one in found.estimates.items()]
    return Answer(repr(found), rows, asdict(found))


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
    estimate_propensities: Annotated[
        bool,
        typer.Option("--estimate-propensities", help="Estimate propensities from the log itself."),
    ] = False,
    version: Annotated[
        int, typer.Option(help="The number of the model on devices; a later one is higher.")
    ] = 0,
    settings: Settings = [],  # noqa: B006
) -> None:
    """Train a model from logged feedback, federated and off-policy.

    `fedbandit evaluate --model` reads the resulting file.
    """
    from fedbandit.core.files import write_bytes
    from fedbandit.deploy.device.model_files import DeviceModel
    from fedbandit.studies.offline import train_from_logs
    from fedbandit.studies.trained_models import trained_on

    dataset = fedbandit.open_dataset(logs)
    header, held_out = dataset.header, dataset.test
    size = min(64, dataset.train.num_clients)
    # Softmax at its default would choose almost evenly: the file says how to explore, and sensibly.
    explores = {"name": "epsilon-greedy", "epsilon": 0.1}
    start = {"rounds": 100, "clients_per_round": size, "policy": explores}
    named = {"objective.name": objective, "rounds": rounds}
    config = configured(what or fedbandit.Config.build(start), settings, named)
    refuse(
        (out.suffix != ".safetensors", f"--out: {out} must end in .safetensors"),
        (
            out.exists() and not force,
            f"{out}: already exists; use another name, or --force to overwrite it",
        ),
    )
    trained = train_from_logs(config, dataset, estimate_propensities=estimate_propensities)
    model = DeviceModel.of_experiment(trained.experiment, trained.weights, version=version)
    model = replace(model, trained_on=trained_on(dataset))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(out, model.to_bytes())
    clients, events = dataset.train.num_clients, dataset.train.num_examples
    what_on = f"{config.rounds} rounds on {events} events of {clients} clients"
    print(f"{config.objective.name}: {what_on}; explores by {dict(model.policy)}")
    if estimate_propensities or header.source.get("propensities") == "estimated":
        print("note: propensities are estimated: right if the log chose by what is in it alone")
    if held_out is None or not held_out.num_examples:
        hold = "`fedbandit data import logged --test-fraction` holds some out"
        print(f"No client is held out to evaluate it on; {hold}")
        return
    print(f"Evaluate it on the {held_out.num_clients} clients that were held out:")
    policy = "--policy epsilon-greedy --set epsilon=0.1"
    print(f"fedbandit evaluate {logs} --split test {policy} --model {out}")


def export(
    run: Annotated[Path, typer.Argument(help="A run folder, or a model file.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The file: .safetensors, .onnx or .json.")
    ],
    kind: Annotated[
        Literal["safetensors", "onnx", "json"] | None,
        typer.Option("--format", help="The format.", show_default="by the file's ending"),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="The policy to explore by.", show_default="the run's")
    ] = None,
    parameters: Parameters = [],  # noqa: B006
    data: Annotated[
        str | None, typer.Option(help="The data set.", show_default="the run's")
    ] = None,
    catalogue: Annotated[
        bool, typer.Option(help="Carry the features of the items, over candidates.")
    ] = True,
    version: Annotated[
        int | None, typer.Option(help="The number on devices.", show_default="rounds trained")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a run's trained model to a file for apps.

    A .safetensors file is for `fedbandit.deploy.Agent`, .onnx for other runtimes, .json for linear
    models anywhere.
    """
    refuse((policy is None and parameters, "--set: sets parameters of --policy, which is missing"))
    named = None if policy is None else {"name": policy, **parsed_settings(parameters)}
    opened = None if data is None else fedbandit.open_dataset(data)
    path = fedbandit.export(
        run,
        out,
        format=kind,
        policy=named,
        dataset=opened,
        catalogue=catalogue,
        version=version,
        overwrite=force,
    )
    print(f"{path}: {path.stat().st_size:,} bytes")
    if path.suffix == ".safetensors":
        print(f'Agent("device").install(Path("{path}")) acts with it')


def tune(
    what: What,
    data: OwnData = None,
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
    estimator: Annotated[
        Literal["ips", "snips", "dr"], typer.Option(help="The estimator.")
    ] = "snips",
    cost: Annotated[
        float, typer.Option(help="Share of the reward that more exploration may cost.")
    ] = 0.05,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Run every candidate and compare.")
    ] = True,
    seeds: Annotated[
        int, typer.Option(help="Number of seeds of that comparison; none of them made the log.")
    ] = 2,
    out: Folder = Path("tuning"),
    settings: Settings = [],  # noqa: B006
    workers: Workers = None,
    engine: Engine = "threads",
    ray_address: RayAddress = None,
) -> Answer:
    """Choose learning rates and exploration from logs.

    Simulates one deployment period, evaluates the candidates on its log, and compares the choice
    with the best. Writes a table of the candidates, and of their comparison what `compare` writes.
    """
    from fedbandit.cli.runs import comparison
    from fedbandit.engines import ThreadEngine
    from fedbandit.results.reading import write_table
    from fedbandit.runs.reporting import no_model_acts
    from fedbandit.studies import tuning

    config = configured(what, settings, {"data.source": data})
    refuse(
        (
            check and seeds < 1,
            f"--seeds: the comparison needs at least 1, not {seeds}; use --no-check to skip it",
        )
    )
    if check and (hint := no_model_acts({"each candidate": config})):
        to_stderr().say(hint)
    explored = None if explore is None else numbers("explore", explore)
    with (
        runner_of(engine, ray_address, workers) as runner,
        closing(ThreadEngine(None if config.threads == "auto" else config.threads)) as threads,
    ):
        tuned = tuning.tune(
            config,
            fedbandit.open_dataset(config.data.source),
            server_rates=numbers("server", server),
            client_rates=numbers("client", client),
            exploration=explored or tuning.exploration_around(config),
            engine=threads,
            estimator=estimator,
            cost=cost,
            progress=to_stderr(),
        )
        found = results = None
        if check:
            apart = range(config.seed + 1, config.seed + 1 + seeds)
            found, results = tuning.check(config, tuned, out, seeds=apart, runner=runner, cost=cost)
    rows = tuning.rows_of(tuned, found)
    written = write_table(rows, out / "candidates")
    said = f"{tuning.in_words(tuned, found)}\ntable: {' and '.join(map(str, written))}"
    return comparison(results, out, said=said, rows=rows)


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
) -> Answer:
    """Compare regret bounds with the regret that is measured.

    Draws federated and centralised bounds, and the regret in a simulation whose best policy is
    known, and writes the table beside the picture.
    """
    from fedbandit.policies import Falcon
    from fedbandit.results.plots import require_picture
    from fedbandit.results.reading import write_table
    from fedbandit.studies.regret import DelayStudy, draw, in_words, run_study

    require_picture(out)
    periods = numbers("every", every, int)
    refuse(
        (
            seeds < 1 or any(not 1 <= period <= rounds for period in periods),
            f"--every, --seeds: periods must lie between 1 and {rounds}, and seeds must be at least 1",
        )
    )
    study = DelayStudy(rounds, periods, seeds, epsilon, gamma, log_class, delta)
    try:
        study.setting(), Falcon(gamma=gamma)
    except ValueError as error:
        raise ConfigError("--" + str(error).replace("log_class", "log-class")) from None
    found = run_study(study, to_stderr())
    rows = [one.row() for one in found]
    files = [draw(study, found, out), *write_table(rows, out, [".csv"])]
    return Answer(f"{in_words(study, found)}\n{'; '.join(map(str, files))}", rows)


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
) -> Answer:
    """Estimate the regret of a run against the best policy.

    This is the federated regret (eq. 4 of the paper) of the run's policy with its newest model,
    against the best policy of the same class.
    """
    from fedbandit.assembly.experiment import build_experiment
    from fedbandit.engines import ThreadEngine
    from fedbandit.presets import load
    from fedbandit.studies.regret import best_in_class, estimated_regret
    from fedbandit.studies.trained_models import newest_state

    refuse(
        (not (run / "config.toml").exists(), f"{run}: not a run folder (no config.toml)"),
        error=DataError,
    )
    config = load(str(run / "config.toml"))
    experiment = build_experiment(config, fedbandit.open_dataset(data or config.data.source))
    reached = newest_state(run)
    now = max(1, reached.round)  # the world may have changed on the way there
    with closing(ThreadEngine(None if config.threads == "auto" else config.threads)) as engine:
        best = best_in_class(
            experiment, engine, rounds=rounds, round_number=now, client_learning_rate=learning_rate
        )
    found = estimated_regret(
        experiment, reached.weights, best, round_number=now, events=reached.events
    )
    value = {"best": found.best, "ours": found.ours, "regret": found.value}
    told = [
        f"best of the class {found.best:.4f}, ours {found.ours:.4f}: regret {found.value:.4f} per event",
        "averaged over clients, each counting the same; the best is by full-information",
        "training on their data",
    ]
    if found.reference_beaten:
        told.append(
            "note: ours earned more than full-information training found;"
            " give it more rounds or another rate"
        )
    return Answer("\n".join(told), [value], value)
