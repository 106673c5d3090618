"""`fedbandit privacy` as a user types it."""

import html
import json

import pytest
from audit_violations import VIOLATIONS
from command_line import fails_with_one_line, in_this_process
from typer.testing import CliRunner

from fedbandit.cli.privacy import app
from fedbandit.config import Config
from fedbandit.core.errors import ConfigError
from fedbandit.privacy.reporting import in_one_line
from fedbandit.report.report import write_report
from fedbandit.runs.run import execute
from fedbandit.studies.privacy import ClipNorm, Tried

SMALL = [
    "epsilon",
    "--population",
    "99",
    "--clients-per-round",
    "2",
    "--noise",
    "1",
    "--rounds",
    "9",
]
STACKOVERFLOW = ["--population", "342477", "--delta", "1e-6"]


def lines(*arguments):
    result = CliRunner().invoke(
        app, [str(argument) for argument in arguments], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


@pytest.mark.parametrize(
    ("clients", "noise", "rounds", "printed"),
    [(64, 0.3, 1600, "15.8"), (64, 0.7, 1600, "1.49"), (6400, 1.0, 800, "4.10")],
)
def test_epsilon_stands_alone_on_the_first_line(clients, noise, rounds, printed):
    given = [*STACKOVERFLOW, "--clients-per-round", clients, "--noise", noise, "--rounds", rounds]
    shown = lines("epsilon", *given, "--accountant", "rdp")
    assert shown[0] == printed
    assert any("added or removed" in line for line in shown)
    assert any(line.startswith("unit: one client") for line in shown)


def test_pld_is_tighter():
    given = [*STACKOVERFLOW, "--clients-per-round", 64, "--noise", 0.7, "--rounds", 1600]
    assert float(lines("epsilon", *given, "--accountant", "pld")[0]) == pytest.approx(
        0.19, abs=0.005
    )


def test_fixed_cohorts_print_the_unamplified_epsilon():
    given = [
        *STACKOVERFLOW,
        "--clients-per-round",
        64,
        "--noise",
        0.7,
        "--rounds",
        1600,
        "--sampling",
        "fixed",
    ]
    shown = lines("epsilon", *given)
    assert float(shown[0]) > 1000
    assert "no meaningful guarantee" in shown[1]
    assert "no amplification" in shown[-1]


def test_noise_solves_the_other_way():
    given = [*STACKOVERFLOW, "--clients-per-round", 64, "--rounds", 1600]
    noise = lines("noise", *given, "--epsilon", 4)[0]
    assert float(lines("epsilon", *given, "--noise", noise)[0]) == pytest.approx(4.0, abs=0.01)


def test_many_runs_cost_what_they_cost_together():
    shown = lines(*SMALL, "--runs", 9)
    assert "9 runs" in shown[-1]
    assert "tuning spends privacy" in shown[-1]


def test_compared_mechanisms_stand_in_order_and_can_be_drawn(tmp_path):
    out = tmp_path / "errors.png"
    given = [
        "--population",
        4000,
        "--clients-per-round",
        20,
        "--rounds",
        40,
        "--epsilon",
        4,
        "--bands",
        4,
        "--out",
        out,
    ]
    shown = lines("compare", *given)
    errors = [float(line.split()[0]) for line in shown[1:-3]]
    assert errors == sorted(errors)
    assert len(errors) == 7
    assert any("blt with 3 buffers" in line for line in shown)
    assert any("Honaker" in line for line in shown)
    assert out.read_bytes().startswith(b"\x89PNG")


AUDIT = ["audit", "--mechanism", "dp-ftrl", "--rounds", "6", "--target", "simulation"]


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        ([], 0, "tests; right rounds fail any of them in 0.001 of audits at most"),
        (["--verbose"], 0, "independence of rounds: correlation"),
        (["--noise", "900", "--runs", "1"], 2, "clip norm and divisor: a client moves sums by"),
    ],
)
def test_an_audit_passes_or_cannot_tell(given, code, said):
    result = CliRunner().invoke(app, [*AUDIT, *given])
    assert result.exit_code == code, result.output
    assert said in result.output
    assert result.stdout.splitlines()[0] == {0: "passed", 2: "cannot tell"}[code]


def test_an_audit_fails():
    with VIOLATIONS["half the noise"]():
        result = CliRunner().invoke(app, AUDIT)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[0] == "violated"
    assert "  noise: 0.50" in result.output


def test_extrapolation_is_the_papers():
    given = [
        "--population",
        340000,
        "--clients-per-round",
        64,
        "--noise",
        0.01,
        "--rounds",
        800,
        "--scale",
        100,
    ]
    shown = lines("extrapolate", *given)
    assert shown[0] == "4.13"
    assert any("64 -> 6400" in line for line in shown)


def test_plot_draws(tmp_path):
    out = tmp_path / "epsilon.png"
    given = [
        "--population",
        2000,
        "--clients-per-round",
        64,
        "--noise",
        2,
        "--rounds",
        20,
        "--sampling",
        "fixed",
    ]
    assert lines("plot", *given, "--out", out) == [str(out)]
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["epsilon", "--population", 10, "--clients-per-round", 20, "--noise", 1, "--rounds", 1],
            "clients_per_round",
        ),
        (
            ["epsilon", "--population", 10, "--clients-per-round", 2, "--noise", -1, "--rounds", 1],
            "noise_multiplier",
        ),
        (
            [*SMALL, "--mechanism", "dp-ftrl", "--sampling", "poisson"],
            "amplification",
        ),
        ([*AUDIT, "--noise", 0], "--noise"),
        (
            [
                "epsilon",
                "--population",
                10,
                "--clients-per-round",
                2,
                "--noise",
                1,
                "--rounds",
                1,
                "--mechanism",
                "none",
            ],
            "--mechanism",
        ),
    ],
)
def test_nonsense_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "known"),
    [([*SMALL, "--accountant", "x"], "'rdp', 'pld'"), ([*AUDIT, "--target", "x"], "'deployment'")],
)
def test_a_wrong_choice_is_one_line_that_says_what_there_is(arguments, known):
    fails_with_one_line(in_this_process("privacy", *arguments), arguments[-2], known)


def test_answers_are_json_where_programs_ask(tmp_path):
    found = json.loads("\n".join(lines(*SMALL, "--json")))
    assert found["epsilon"] > 0
    assert "one client" in found["unit"]
    rows = json.loads("\n".join(lines(*AUDIT, "-q", "--json", "-o", tmp_path / "audit.csv")))
    assert {row["verdict"] for row in rows} == {"passed"}
    assert (tmp_path / "audit.csv").read_text().count("\n") == len(rows) + 1


@pytest.mark.slow
def test_clip_norm_prints_a_norm_and_the_next_command(tmp_path):
    toml = tmp_path / "small.toml"
    toml.write_text(
        'scenario = "scratch"\nrounds = 40\ndeploy_every = 10\nclients_per_round = 16\nthreads = 1\n'
        '[clipping]\nnorm = 1.0\n[privacy]\nmechanism = "dp-fedavg"\nnoise_multiplier = 0.5\n'
    )
    shown = lines("clip-norm", toml)
    norm = float(shown[0])
    assert 0 < norm < 10
    assert "quantile 0.5 without noise" in shown[1]
    assert sum(line.split()[0].replace(".", "").isdigit() for line in shown[3:12]) == 9
    assert f"clipping.norm={norm:g}" in shown[-2]
    assert "without privacy" in shown[-1]


def test_no_rates_are_recommended_where_several_earned_exactly_the_same():
    tried = (Tried(0.01, 0.1, 0.02), Tried(0.02, 0.1, 0.02), Tried(0.05, 0.1, None))
    said = ClipNorm(0.016, 0.0161, 0.5, 40, tried).in_words().splitlines()
    assert said[-3:-1] == [
        "no rates are best: several earned exactly the same, or all diverged",
        "next: --set clipping.norm=0.016",
    ]
    assert max(map(len, said)) <= 80
    ahead = ClipNorm(0.016, 0.0161, 0.5, 40, (*tried, Tried(0.05, 0.2, 0.03))).in_words()
    assert "clipping.norm=0.016 --set server.learning_rate=0.05 --set client.learn" in ahead


def test_a_run_folder_holds_epsilon_and_what_it_assumes(tmp_path):
    config = Config.build(
        {
            "scenario": "scratch",
            "rounds": 3,
            "deploy_every": 2,
            "threads": 1,
            "clipping": {"norm": 0.5},
            "privacy": {"mechanism": "dp-fedavg", "noise_multiplier": 1.0},
        }
    )
    outcome = execute(config, tmp_path / "run")
    rounds = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    kept = json.loads((tmp_path / "run" / "summary.json").read_text())["privacy"]
    assert outcome.summary["privacy"] == kept
    assert kept["epsilon_rdp"] == rounds[-1]["epsilon"]
    assert kept["epsilon_pld"] == rounds[-1]["epsilon_pld"]
    assert "2000 clients" in kept["assumptions"]["sampling"]
    line = in_one_line(kept)
    assert "delta 1e-06 after 3 rounds" in line
    assert "recompute" in kept["noise"]
    page = write_report([tmp_path], tmp_path / "report.html").read_text(encoding="utf-8")
    assert html.escape(line) in page
