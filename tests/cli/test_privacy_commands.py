"""`fedbandit privacy` as a user types it."""

import html
import json

import pytest
from typer.testing import CliRunner

from fedbandit.cli.privacy import app
from fedbandit.config import Config
from fedbandit.core.errors import ConfigError
from fedbandit.privacy.reporting import in_one_line
from fedbandit.report.report import write_report
from fedbandit.runs.run import execute

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
    return result.output.splitlines()


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
    errors = [float(line.split()[0]) for line in shown[1:-2]]
    assert errors == sorted(errors)
    assert len(errors) == 7
    assert any("blt with 3 buffers" in line for line in shown)
    assert any("Honaker" in line for line in shown)
    assert out.read_bytes().startswith(b"\x89PNG")


AUDIT = ["audit", "--mechanism", "dp-ftrl", "--rounds", "10", "--source", "simulation"]


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        ([], 0, "finds half the noise"),
        (["--actual-noise", "0"], 1, "violated"),
        (["--actual-noise", "1"], 1, "violated"),
        (["--noise", "90", "--trials", "60"], 2, "decide nothing: it takes"),
    ],
)
def test_an_audit_passes_fails_or_cannot_say(given, code, said):
    result = CliRunner().invoke(app, [*AUDIT, *given])
    assert result.exit_code == code, result.output
    assert said in result.output
    assert result.output.splitlines()[0] == {0: "passed", 1: "violated", 2: "inconclusive"}[code]


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
        (
            [*SMALL, "--accountant", "x"],
            "--accountant",
        ),
        ([*AUDIT, "--source", "x"], "--source"),
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


@pytest.mark.slow
def test_clip_norm_prints_a_norm_and_the_next_command(tmp_path):
    toml = tmp_path / "small.toml"
    toml.write_text(
        'scenario = "scratch"\nrounds = 40\nclients_per_round = 16\nthreads = 1\n'
        '[clipping]\nnorm = 1.0\n[privacy]\nmechanism = "dp-fedavg"\nnoise_multiplier = 0.5\n'
    )
    shown = lines("clip-norm", toml)
    norm = float(shown[0])
    assert 0 < norm < 10
    assert "quantile 0.5 without noise" in shown[1]
    assert sum(line.split()[0].replace(".", "").isdigit() for line in shown[3:12]) == 9
    assert f"clipping.norm={norm:g}" in shown[-2]
    assert "without privacy" in shown[-1]


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
