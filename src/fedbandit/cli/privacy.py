"""`fedbandit privacy`: epsilon of a plan, noise for a budget, mechanisms compared, clip norms and audits.

A thin layer over the library.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click
import typer

from fedbandit.cli.help import Answer, Commands, OwnData, Settings, What, configured
from fedbandit.core.errors import ConfigError, refuse
from fedbandit.core.progress import to_stderr

if TYPE_CHECKING:
    from fedbandit.config import Config
    from fedbandit.privacy.accounting import Ledger

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
Accountant = Annotated[Literal["rdp", "pld"], typer.Option(help="The accountant; pld is tighter.")]
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
) -> Answer:
    """Print epsilon, and below it the assumptions."""
    from fedbandit.privacy.reporting import sweep_cost

    ledger = _ledger(
        population,
        clients_per_round,
        rounds,
        noise_multiplier=noise,
        delta=delta,
        mechanism=mechanism,
        sampling=sampling,
        separation=separation,
        bands=bands,
    )
    return _epsilon(ledger, accountant, [sweep_cost(ledger, runs)["note"]] if runs > 1 else [])


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
) -> Answer:
    """Print the smallest noise multiplier within a budget."""
    ledger = _ledger(
        population,
        clients_per_round,
        rounds,
        epsilon=epsilon,
        delta=delta,
        accountant=accountant,
        mechanism=mechanism,
        sampling=sampling,
        separation=separation,
        bands=bands,
    )
    found = ledger.plan.noise_multiplier
    spent = ledger.epsilon(rounds) if accountant == "rdp" else ledger.tight_epsilon(rounds)
    after = f"at delta {delta:g} by {accountant.upper()} after {rounds} rounds"
    said = [f"{found:g}", f"epsilon {spent:.4f} of {epsilon:g} {after}"]
    return _with_assumptions(ledger, said, {"noise_multiplier": found, "epsilon": spent})


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
        int | None, typer.Option(help="Bands of banded-mf.", show_default="4, 8, 16, 32 and 64")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Draw them too (.png, .svg or .pdf).")
    ] = None,
) -> Answer:
    """Print the noise that each mechanism leaves in the weights.

    All at the same epsilon; the first is the one that mechanism = "best" takes.
    """
    from fedbandit.results.differences import text_table
    from fedbandit.studies.privacy import compare_mechanisms, draw_errors

    config = _config(
        clients_per_round,
        rounds,
        {
            "mechanism": "best",
            "epsilon": epsilon,
            "delta": delta,
            "accountant": accountant,
            "bands": bands,
        },
        momentum,
    )
    found = compare_mechanisms(config, population)
    lines = [["error", "noise", "memory", "mechanism"]]
    for one in found:
        lines.append([f"{one.error:.3g}", f"{one.noise_multiplier:.4g}", str(one.memory), one.name])
    told = [
        text_table(lines, left=(3,)),
        f"error: root mean square noise of the weights over {rounds} rounds, in clip norms",
        f"on the sum, at epsilon {epsilon:g}, delta {delta:g} by {accountant.upper()};"
        " memory: vectors as long as the model",
    ]
    if out is not None:
        told.append(str(draw_errors(found, config, population, out)))
    shown = ("name", "error", "noise_multiplier", "memory")
    return Answer("\n".join(told), [{key: getattr(one, key) for key in shown} for one in found])


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
) -> Answer:
    """Print the epsilon of the same training with more clients.

    The paper's argument: if clients per round and noise grow together, the noise of the mean stays the same, and so
    should the reward; epsilon falls.
    """
    from fedbandit.privacy.reporting import extrapolated

    small = _ledger(
        max(population, clients_per_round),
        clients_per_round,
        rounds,
        noise_multiplier=noise,
        delta=delta,
    )
    large = replace(small, plan=_mended(extrapolated, small.plan, scale, population))
    told = [
        f"scaled by {scale:g}: {clients_per_round} -> {large.plan.clients_per_round} clients a round,"
        f" noise {noise:g} -> {large.plan.noise_multiplier:g};",
        f"noise of the mean in clip norms stays {noise / clients_per_round:.3g}",
        "the reward is expected to stay the same; that is an argument, not a measurement",
    ]
    return _epsilon(large, accountant, told)


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
    from fedbandit.studies.privacy import draw_epsilon

    refuse((noise == 0, "--noise: without noise there is no epsilon to draw"))
    ledger = _ledger(
        population,
        clients_per_round,
        rounds,
        noise_multiplier=noise,
        delta=delta,
        mechanism=mechanism,
        sampling=sampling,
        separation=separation,
    )
    print(draw_epsilon(ledger, out))


@app.command("clip-norm")
def clip_norm(
    what: What,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds of each run.", show_default="as configured")
    ] = None,
    data: OwnData = None,
    quantile: Annotated[float, typer.Option(help="Quantile of the update norms.")] = 0.5,
    grid: Annotated[
        bool, typer.Option(help="Then try learning rates around the configured ones.")
    ] = True,
    settings: Settings = [],  # noqa: B006
) -> Answer:
    """Find a clip norm without noise, then learning rates for it.

    This is the paper's recipe. It looks at the clients without privacy.
    """
    from fedbandit.runs.reporting import no_model_acts
    from fedbandit.studies.privacy import find_clip_norm

    config = configured(what, settings, {"rounds": rounds, "data.source": data})
    if grid and (hint := no_model_acts({"each run": config})):
        to_stderr().say(hint)
    found = find_clip_norm(config, quantile, grid, to_stderr())
    return Answer(found.in_words(), [vars(one) for one in found.tried], vars(found))


@app.command()
def audit(
    mechanism: Annotated[
        str | None,
        typer.Option(
            help="Audit a plan with this mechanism alone.",
            show_default="one plan of every mechanism",
        ),
    ] = None,
    population: Population = 240,
    clients_per_round: ClientsPerRound = 24,
    noise: Noise = 1.0,
    rounds: Rounds = 12,
    delta: Delta = 1e-5,
    sampling: Sampling = None,
    separation: Separation = None,
    bands: Bands = None,
    adaptive: Annotated[
        bool, typer.Option("--adaptive", help="Adaptive clipping, whose count is audited too.")
    ] = False,
    restart_every: Annotated[
        int | None, typer.Option(min=1, help="Rounds after which correlated noise restarts.")
    ] = None,
    target: Annotated[
        list[str],
        typer.Option(
            click_type=click.Choice(("simulation", "system", "deployment")),
            help="The rounds to audit; repeatable.",
            show_default="all three",
        ),
    ] = [],  # noqa: B006
    runs: Annotated[
        int | None,
        typer.Option(min=1, help="Runs of each plan.", show_default="enough to tell"),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print every test.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the audited simulations.")] = 0,
) -> Answer:
    """Test whether real rounds keep what epsilon counts on.

    Noise, its correlation, sampling, clipping, divisor, grid and figures, by planted clients.
    Exit code 0: passed, and the audit could have failed. 1: violated. 2: cannot tell.
    """
    from fedbandit.studies.privacy_audit import TARGETS, audit, audit_case, in_words, rows_of

    cases = None
    if mechanism is not None:
        refuse((noise == 0, "--noise: a plan without noise promises nothing to audit"))
        privacy = {
            "mechanism": mechanism,
            "noise_multiplier": noise,
            "delta": delta,
            "sampling": sampling,
            "separation": separation,
            "bands": bands,
            "restart_at_deployments": restart_every is not None,
        }
        case = audit_case(
            population,
            clients_per_round,
            rounds,
            privacy=privacy,
            adaptive=adaptive,
            deploy_every=restart_every or rounds,
        )
        cases = {mechanism: case}
    chosen = [one for one in TARGETS if one in target] or TARGETS
    findings = audit(cases, chosen, runs=runs, seed=seed, progress=to_stderr())
    verdict, text = in_words(findings, verbose)
    codes = {"passed": 0, "violated": 1, "cannot tell": 2}
    return Answer(text, rows_of(findings), code=codes[verdict])


def _ledger(population: int, clients_per_round: int, rounds: int, **privacy: Any) -> "Ledger":
    """The ledger that a run with these values would have, made the way a run makes it."""
    from fedbandit.assembly.privacy import build_ledger

    refuse(
        (privacy.setdefault("mechanism", "dp-fedavg") == "none", "--mechanism: none has no epsilon")
    )
    config = _config(clients_per_round, rounds, privacy)
    ledger = build_ledger(config, population, pretrained=False)
    assert ledger is not None
    return ledger


def _config(
    clients_per_round: int, rounds: int, privacy: dict[str, Any], momentum: float = 0.0
) -> "Config":
    """A run with these values whose server adds up what it gets."""
    from fedbandit.config import Config

    return Config.build(
        {
            "scenario": "scratch",
            "rounds": rounds,
            "clients_per_round": clients_per_round,
            "clipping": {"norm": 1.0},
            "server": {"optimizer": "sgd", "momentum": momentum},
            "privacy": privacy,
        }
    )


def _epsilon(ledger: "Ledger", accountant: str, more: list[str]) -> Answer:
    """The epsilon of a whole plan: the number alone on the first line."""
    from fedbandit.privacy.accounting import hopeless
    from fedbandit.privacy.reporting import show, verdict

    plan, by = ledger.plan, accountant.upper()
    found = ledger.epsilon(plan.rounds) if by == "RDP" else ledger.tight_epsilon(plan.rounds)
    if by == "PLD" and hopeless(found):
        by = "RDP (too large for PLD to be worth the time)"
    said = [show(found), f"epsilon at delta {plan.delta:g} by {by}: {verdict(found)}"]
    facts = {"epsilon": found, "delta": plan.delta, "noise_multiplier": plan.noise_multiplier}
    return _with_assumptions(ledger, said, facts, more)


def _with_assumptions(
    ledger: "Ledger", said: list[str], facts: dict[str, Any], more: list[str] | None = None
) -> Answer:
    """An answer that says what it assumes."""
    from fedbandit.privacy.reporting import assumptions

    assumed = assumptions(ledger.plan)
    text = [*said, *(f"{name}: {words}" for name, words in assumed.items()), *(more or [])]
    value = {**facts, **assumed}
    return Answer("\n".join(text), [value], value)


def _mended(make: Any, *arguments: Any) -> Any:
    """Call it, turning what a plan refuses into an error of the command line."""

    try:
        return make(*arguments)
    except ValueError as error:
        key, _, problem = str(error).partition(": ")
        raise ConfigError(f"--{key.replace('_', '-')}: {problem}") from None
