"""`fedbandit privacy`: epsilon of a plan, noise for a budget, mechanisms compared, clip norms and audits.

A thin layer over the library.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedbandit.cli.help import Commands

app = Commands("Compute epsilon, noise and clip norms; audit the mechanism.")
Population = Annotated[int, typer.Option(help="Number of clients that may take part.")]
ClientsPerRound = Annotated[
    int, typer.Option(help="Clients per round: on average with poisson, otherwise exactly.")
]
Noise = Annotated[
    float, typer.Option(help="Noise multiplier: standard deviation divided by the clip norm.")
]
Rounds = Annotated[int, typer.Option(help="Number of rounds.")]
Delta = Annotated[float, typer.Option(help="Delta, well below 1/population.")]
Accountant = Annotated[str, typer.Option(help="The accountant: rdp or pld (tighter).")]
Mechanism = Annotated[
    str, typer.Option(help="The mechanism: dp-fedavg, dp-ftrl, banded-mf or blt.")
]
Sampling = Annotated[
    str | None,
    typer.Option(
        help="The sampling: poisson, cyclic-poisson, fixed or min-separation.",
        show_default="what suits the mechanism",
    ),
]
Separation = Annotated[
    int | None,
    typer.Option(
        help="Rounds between two participations of a client.", show_default="as many as possible"
    ),
]
Bands = Annotated[
    int | None,
    typer.Option(help="Bands of banded-mf.", show_default="32, or the separation if less"),
]
What = Annotated[str, typer.Argument(metavar="NAME_OR_TOML", help="A preset or a TOML file.")]
Settings = Annotated[
    list[str],
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Set any value of the configuration; repeatable."
    ),
]


@app.command()
def epsilon(
    population: Population,
    clients_per_round: ClientsPerRound,
    noise: Noise,
    rounds: Rounds,
    delta: Delta = 1e-6,
    accountant: Accountant = "rdp",
    mechanism: Mechanism = "dp-fedavg",
    sampling: Sampling = None,
    separation: Separation = None,
    bands: Bands = None,
    runs: Annotated[
        int, typer.Option(min=1, help="Runs on the same clients, as in a sweep: all of them count.")
    ] = 1,
) -> None:
    """Print epsilon, and below it the assumptions."""
    from fedbandit.privacy.reporting import sweep_cost

    ledger = _ledger(
        population,
        clients_per_round,
        rounds,
        delta,
        mechanism,
        sampling,
        separation,
        bands,
        noise=noise,
    )
    _print_epsilon(ledger, accountant)
    if runs > 1:
        print(sweep_cost(ledger, runs)["note"])


@app.command()
def noise(
    population: Population,
    clients_per_round: ClientsPerRound,
    epsilon: Annotated[float, typer.Option(help="The privacy budget.")],
    rounds: Rounds,
    delta: Delta = 1e-6,
    accountant: Accountant = "rdp",
    mechanism: Mechanism = "dp-fedavg",
    sampling: Sampling = None,
    separation: Separation = None,
    bands: Bands = None,
) -> None:
    """Print the smallest noise multiplier within a budget."""
    ledger = _ledger(
        population,
        clients_per_round,
        rounds,
        delta,
        mechanism,
        sampling,
        separation,
        bands,
        epsilon=epsilon,
        accountant=_accountant(accountant),
    )
    print(f"{ledger.plan.noise_multiplier:g}")
    spent = ledger.epsilon(rounds) if accountant == "rdp" else ledger.tight_epsilon(rounds)
    print(
        f"epsilon {spent:.4f} of {epsilon:g} at delta {delta:g} by {accountant.upper()} after {rounds} rounds"
    )
    _print_assumptions(ledger.plan)


@app.command()
def compare(
    population: Population,
    clients_per_round: ClientsPerRound,
    epsilon: Annotated[float, typer.Option(help="The privacy budget of each.")],
    rounds: Rounds,
    delta: Delta = 1e-6,
    accountant: Accountant = "rdp",
    momentum: Annotated[
        float, typer.Option(min=0, max=0.999, help="Momentum of the server's optimiser.")
    ] = 0.0,
    bands: Annotated[
        int | None, typer.Option(help="Bands of banded-mf.", show_default="4, 8, 16 and 32")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Draw them too (.png, .svg or .pdf).")
    ] = None,
) -> None:
    """Print the noise that each mechanism leaves in the weights.

    All at the same epsilon; the first is the one that mechanism = "best" takes.
    """
    from fedbandit.studies.privacy import compare_mechanisms, draw_errors

    config = _config(
        clients_per_round,
        rounds,
        {
            "mechanism": "best",
            "epsilon": epsilon,
            "delta": delta,
            "accountant": _accountant(accountant),
            "bands": bands,
        },
        momentum,
    )
    found = compare_mechanisms(config, population)
    print(f"{'error':>6}  {'noise':>7}  {'memory':>6}  mechanism")
    for one in found:
        print(f"{one.error:>6.3g}  {one.noise_multiplier:>7.4g}  {one.memory:>6}  {one.name}")
    print(
        f"error: root mean square noise of the weights over {rounds} rounds, in clip norms on the sum, at epsilon"
        f" {epsilon:g}, delta {delta:g} by {accountant.upper()}; memory: vectors as long as the model"
    )
    if out is not None:
        print(draw_errors(found, config, population, out))


@app.command()
def extrapolate(
    scale: Annotated[float, typer.Option(help="Factor by which clients per round and noise grow.")],
    population: Annotated[
        int, typer.Option(help="Number of clients that may take part after scaling.")
    ],
    clients_per_round: ClientsPerRound,
    noise: Noise,
    rounds: Rounds,
    delta: Delta = 1e-6,
    accountant: Accountant = "rdp",
) -> None:
    """Print the epsilon of the same training with more clients.

    The paper's argument: if clients per round and noise grow together, the noise of the mean stays the same, and so
    should the reward; epsilon falls.
    """
    from dataclasses import replace

    from fedbandit.privacy.reporting import extrapolated

    small = _ledger(max(population, clients_per_round), clients_per_round, rounds, delta, "dp-fedavg", None, None,
                    noise=noise)  # fmt: skip
    large = replace(small, plan=_mended(extrapolated, small.plan, scale, population))
    _print_epsilon(large, accountant)
    print(
        f"scaled by {scale:g}: {clients_per_round} -> {large.plan.clients_per_round} clients a round, noise"
        f" {noise:g} -> {large.plan.noise_multiplier:g}; noise of the mean in clip norms stays"
        f" {noise / clients_per_round:.3g}"
    )
    print("the reward is expected to stay the same; that is an argument, not a measurement")


@app.command()
def plot(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The picture to write (.png, .svg or .pdf).")
    ],
    population: Population,
    clients_per_round: ClientsPerRound,
    noise: Noise,
    rounds: Rounds,
    delta: Delta = 1e-6,
    mechanism: Mechanism = "dp-fedavg",
    sampling: Sampling = None,
    separation: Separation = None,
) -> None:
    """Draw epsilon against rounds."""
    from fedbandit.core.errors import ConfigError
    from fedbandit.studies.privacy import draw_epsilon

    if noise == 0:
        raise ConfigError("--noise: without noise there is no epsilon to draw")
    ledger = _ledger(
        population, clients_per_round, rounds, delta, mechanism, sampling, separation, noise=noise
    )
    print(draw_epsilon(ledger, out))


@app.command("clip-norm")
def clip_norm(
    what: What,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds of each run.", show_default="as configured")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="A data set folder, or the embedded glyphs or topics.")
    ] = None,
    quantile: Annotated[float, typer.Option(help="Quantile of the update norms.")] = 0.5,
    grid: Annotated[
        bool, typer.Option(help="Then try learning rates around the configured ones.")
    ] = True,
    settings: Settings = [],  # noqa: B006
) -> None:
    """Find a clip norm without noise, then learning rates for it.

    This is the paper's recipe. It looks at the clients without privacy.
    """
    from fedbandit.config import parse_settings
    from fedbandit.data import open_dataset
    from fedbandit.presets import load
    from fedbandit.studies.privacy import estimate_norm, rounded, try_rates

    named = {"rounds": rounds, "data.source": data}
    chosen = {key: value for key, value in named.items() if value is not None}
    config = load(what).with_values({**chosen, **parse_settings(settings)})
    dataset = open_dataset(config.data.source)
    found = estimate_norm(config, dataset, quantile)
    norm = rounded(found)
    print(f"{norm:g}")
    print(
        f"adaptive clipping at quantile {quantile:g} without noise settled at {found:.4g} in {config.rounds} rounds"
    )
    if grid:
        print("server rate  client rate  running reward")
        tried = []
        for point in try_rates(config, norm, dataset):
            reward = "diverged" if point.running_reward is None else f"{point.running_reward:.4f}"
            print(
                f"{point.server_learning_rate:>11g}  {point.client_learning_rate:>11g}  {reward:>14}"
            )
            tried.append(point)
        best = max(
            tried, key=lambda point: -1.0 if point.running_reward is None else point.running_reward
        )
        print(
            f"next: --set clipping.norm={norm:g} --set server.learning_rate={best.server_learning_rate:g}"
            f" --set client.learning_rate={best.client_learning_rate:g}"
        )
    print("this used the clients' data without privacy: use public data, or account for it")


@app.command()
def audit(
    population: Population = 60,
    clients_per_round: ClientsPerRound = 12,
    noise: Noise = 2.0,
    rounds: Rounds = 10,
    delta: Delta = 1e-5,
    mechanism: Mechanism = "dp-fedavg",
    sampling: Sampling = None,
    separation: Separation = None,
    bands: Bands = None,
    adaptive: Annotated[
        bool, typer.Option("--adaptive", help="Adaptive clipping, whose count is attacked too.")
    ] = False,
    source: Annotated[
        str, typer.Option(help="Whose noise: simulation, deployment or both.")
    ] = "both",
    trials: Annotated[
        int | None,
        typer.Option(
            min=50,
            help="Planted clients, half of them absent.",
            show_default="enough to find half the noise",
        ),
    ] = None,
    actual_noise: Annotated[
        float | None,
        typer.Option(
            min=0, help="Add this noise instead of the stated one, to see the audit fail."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the audit's own draws.")] = 0,
) -> None:
    """Attack the noise of rounds with planted clients.

    Exit code 0: passed, and half the noise would have been found. 1: the promise is violated. 2: too few trials to say.
    """
    from fedbandit.core.errors import ConfigError
    from fedbandit.studies import privacy_audit

    if source not in ("simulation", "deployment", "both"):
        raise ConfigError(f"--source: should be simulation, deployment or both, not {source}")
    if noise == 0:
        raise ConfigError("--noise: a plan without noise promises nothing that could be audited")
    ledger = _ledger(population, clients_per_round, rounds, delta, mechanism, sampling, separation, bands, noise=noise,
                     adaptive=adaptive)  # fmt: skip
    share = 1.0 if actual_noise is None else actual_noise / noise
    sources: Any = ("simulation", "deployment") if source == "both" else (source,)
    found = [
        one
        for each in sources
        for one in privacy_audit.audit(ledger.plan, each, trials=trials, actual=share, seed=seed)
    ]
    verdicts = {one.verdict for one in found}
    verdict = next(one for one in ("violated", "inconclusive", "passed") if one in verdicts)
    print(verdict)
    for one in found:
        _print_finding(one)
    _print_assumptions(ledger.plan)
    code = {"passed": 0, "violated": 1, "inconclusive": 2}[verdict]
    if code:
        raise typer.Exit(code)


def _print_finding(found: Any) -> None:
    from fedbandit.privacy.reporting import show
    from fedbandit.studies.privacy_audit import MISTAKE

    print(
        f"{found.source}, {found.what}: {found.verdict}; epsilon stated {show(found.stated)}, at least"
        f" {show(found.lower_bound)} ({show(found.one_run)} by one run's guesses) with {1 - MISTAKE:.1%} confidence"
    )
    found_by = "finds half the noise in 95% of audits"
    if found.trials >= found.needed:
        print(f"  {found.trials} planted clients: an audit of this size {found_by}")
    else:
        print(
            f"  {found.trials} planted clients decide nothing: it takes {found.needed} until an audit {found_by}"
        )


def _ledger(
    population: int,
    clients_per_round: int,
    rounds: int,
    delta: float,
    mechanism: str,
    sampling: str | None,
    separation: int | None,
    bands: int | None = None,
    *,
    noise: float | None = None,
    epsilon: float | None = None,
    accountant: str = "rdp",
    adaptive: bool = False,
) -> Any:
    """The ledger that a run with these values would have, made the way a run makes it."""
    from fedbandit.assembly.privacy import build_ledger
    from fedbandit.core.errors import ConfigError

    if mechanism == "none":
        raise ConfigError("--mechanism: none has no epsilon")
    privacy = {
        "mechanism": mechanism,
        "noise_multiplier": noise,
        "epsilon": epsilon,
        "delta": delta,
        "sampling": sampling,
        "separation": separation,
        "bands": bands,
        "accountant": accountant,
    }
    return build_ledger(
        _config(clients_per_round, rounds, privacy, adaptive=adaptive), population, pretrained=False
    )


def _config(
    clients_per_round: int,
    rounds: int,
    privacy: dict[str, Any],
    momentum: float = 0.0,
    adaptive: bool = False,
) -> Any:
    """A run with these values whose server adds up what it gets."""
    from fedbandit.config import Config

    return Config.build(
        {
            "scenario": "scratch",
            "rounds": rounds,
            "clients_per_round": clients_per_round,
            "clipping": {} if adaptive else {"norm": 1.0},
            "server": {"optimizer": "sgd", "momentum": momentum},
            "privacy": privacy,
        }
    )


def _accountant(name: str) -> str:
    from fedbandit.core.errors import ConfigError

    if name not in ("rdp", "pld"):
        raise ConfigError(f"--accountant: should be rdp or pld, not {name}")
    return name


def _print_epsilon(ledger: Any, accountant: str) -> None:
    from fedbandit.privacy.accounting import hopeless
    from fedbandit.privacy.reporting import show, verdict

    plan = ledger.plan
    by_rdp = _accountant(accountant) == "rdp"
    found = ledger.epsilon(plan.rounds) if by_rdp else ledger.tight_epsilon(plan.rounds)
    print(show(found))
    by = (
        "RDP"
        if by_rdp
        else "RDP (too large for PLD to be worth the time)"
        if hopeless(found)
        else "PLD"
    )
    print(f"epsilon at delta {plan.delta:g} by {by}: {verdict(found)}")
    _print_assumptions(plan)


def _print_assumptions(plan: Any) -> None:
    from fedbandit.privacy.reporting import assumptions

    for name, words in assumptions(plan).items():
        print(f"{name}: {words}")


def _mended(make: Any, *arguments: Any) -> Any:
    """Call it, turning what a plan refuses into an error of the command line."""
    from fedbandit.core.errors import ConfigError

    try:
        return make(*arguments)
    except ValueError as error:
        key, _, problem = str(error).partition(": ")
        raise ConfigError(f"--{key.replace('_', '-')}: {problem}") from None
