"""`evaluate`, `train-offline`, `tune`, `theory`, `regret` and `drift`, as a user types them."""

import json
import re

import numpy as np
import pytest
from command_line import fails_with_one_line, in_this_process
from typer.testing import CliRunner

from fedbandit.cli.app import program
from fedbandit.config import Config
from fedbandit.core.errors import ConfigError, DataError, FedbanditError
from fedbandit.data.importers.tables import LoggedOptions, import_table
from fedbandit.engines import ThreadEngine
from fedbandit.runs.run import run
from fedbandit.studies.tuning import exploration_around

app = program()

LOGGING = np.array([0.6, 0.3, 0.1])
ELSEWHERE = np.array([0.1, 0.2, 0.7])
MEANS = np.array([0.2, 0.5, 0.7])
OVERALL = MEANS + np.array([-0.075, 0, 0.15])  # over days with and without rain


def _run(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(result.exception, FedbanditError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Decisions of 150 users; on days of rain action c pays 0.3 more and a 0.15 less."""
    rng = np.random.default_rng(0)
    lines = ["user,weather,action,reward,propensity,elsewhere"]
    for user in range(150):
        for _ in range(30):
            rain = int(rng.random() < 0.5)
            action = rng.choice(3, p=LOGGING)
            mean = MEANS[action] + rain * (-0.15, 0.0, 0.3)[action]
            reward = int(rng.random() < mean)
            lines.append(
                f"u{user:03d},{('sun', 'rain')[rain]},{'abc'[action]},{reward},{LOGGING[action]},{ELSEWHERE[action]}"
            )
    path = tmp_path_factory.mktemp("logs") / "decisions.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def logged(table, tmp_path_factory):
    out = tmp_path_factory.mktemp("logged") / "decisions"
    options = LoggedOptions(
        client="user",
        action="action",
        reward="reward",
        propensity="propensity",
        text=["weather"],
        test_fraction=0.3,
    )
    return import_table(table, out, options)


def _estimates(*words):
    return json.loads(_run("evaluate", *words, "--json"))["estimates"]


def test_policies_without_a_model_are_evaluated_from_a_table(table):
    truths = {
        ("--policy", "uniform"): OVERALL.mean(),
        ("--policy", "constant", "--set", "action=c"): 0.85,
        ("--target", "elsewhere"): (ELSEWHERE * OVERALL).sum(),
    }
    for words, truth in truths.items():
        found = _estimates(table, "--client", "user", *words)
        assert set(found) == (
            {"ips", "snips"} if "--target" in words else {"ips", "snips", "dm", "dr", "switch"}
        )
        for name, one in found.items():
            if name != "dm":  # its interval leaves out the error of its model
                assert abs(one["value"] - truth) < 3 * one["standard_error"], (words, name)
            assert one["clients"] == 150


def test_the_plain_report_says_what_a_person_needs(table):
    said = _run(
        "evaluate",
        table,
        "--client",
        "user",
        "--policy",
        "constant",
        "--set",
        "action=c",
        "--clip",
        "2",
    )
    for words in (
        "4500 events of 150 clients",
        "effective sample size",
        "95% interval",
        "snips",
        "warning: clipping",
    ):
        assert words in said
    said = _run(
        "evaluate", table, "--interval", "bernstein", "--estimators", "ips", "--confidence", "0.9"
    )
    assert "90% interval" in said
    assert "empirical Bernstein" in said
    assert "4500 events of 4500 clients" in said  # without --client every row is one
    assert "weights taken to be at most the log's largest" in said


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (("--policy", "greedy"), ConfigError, "data import logged"),
        (("--policy", "unform"), ConfigError, "uniform"),
        (("--policy", "constant"), ConfigError, "policy.action: missing"),
        (("--policy", "constant", "--set", "action=d"), ConfigError, "no action called 'd'"),
        (("--reward", "rewards"), DataError, "did you mean reward"),
        (("--estimators", "dr", "--target", "elsewhere"), ConfigError, "dr needs"),
        (("--estimators", "xyz"), ConfigError, "xyz"),
        (("--clip", "2", "--shrink", "2"), ConfigError, "give one"),
        (("--clip", "-1"), ConfigError, "clip"),
        (("--confidence", "1.5"), ConfigError, "confidence"),
        (("--interval", "bernstein", "--floor", "0.5"), ConfigError, "floor: the log has"),
        (
            ("--interval", "bernstein", "--floor", "0"),
            ConfigError,
            "floor: a propensity is above 0",
        ),
        (
            ("--interval", "bernstein", "--floor", "-0.1"),
            ConfigError,
            "floor: a propensity is above 0",
        ),
        (
            ("--interval", "bernstein", "--floor", "1.5"),
            ConfigError,
            "floor: a propensity is above 0",
        ),
        (("--interval", "bernstein", "--reward-range", "0,inf"), ConfigError, "reward_range"),
        (("--floor", "0.2"), ConfigError, "floor: the log has"),
        (("--reward-range", "0,0.5"), ConfigError, "reward_range: the log has rewards outside"),
        (
            ("--estimate-propensities", "--floor", "0.1"),
            ConfigError,
            "floor: is of logged propensities",
        ),
        (("--switch", "-1"), ConfigError, "switch: must be positive"),
        (("--split", "train"), ConfigError, "split: a table is not split"),
        (
            ("--target", "elsewhere", "--policy", "uniform"),
            ConfigError,
            "policy: the column elsewhere",
        ),
        (
            ("--target", "elsewhere", "--model", "model.safetensors"),
            ConfigError,
            "model: the column elsewhere",
        ),
        (("--target", "elsewhere", "--set", "action=a"), ConfigError, "set: the column elsewhere"),
        (
            ("--target", "elsewhere", "--reward-model", "actions"),
            ConfigError,
            "reward_model: the column elsewhere",
        ),
        (("--model", "model.safetensors"), ConfigError, "model: uniform looks at no scores"),
        (("--interval", "bernstein", "--reward-range", "1"), ConfigError, "LOW,HIGH"),
        (("--propensity", "reward"), DataError, "propensity cannot be 0"),
    ],
)
def test_mistakes_are_named(table, words, error, message):
    with pytest.raises(error, match=message):
        _run("evaluate", table, *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--target", "elsewhere"), "target: names a column"),
        (("--client", "user"), "client: names a column"),
        (("--action", "item"), "action: names a column"),
        (("--reward", "click"), "reward: names a column"),
        (("--propensity", "p"), "propensity: names a column"),
        (("--available", "could"), "available: names a column"),
        (
            ("--policy", "constant", "--set", "action=a", "--model", "model.safetensors"),
            "model: constant looks at no",
        ),
    ],
)
def test_what_a_data_set_folder_has_no_use_for_is_refused(logged, words, message):
    with pytest.raises(ConfigError, match=message):
        _run("evaluate", logged, *words)


def test_the_predictions_of_a_fitted_model_are_cut_to_the_range_of_the_bound(logged):
    """The same doubly robust estimate as with the bootstrap, but for what a cut prediction changes."""
    words = (logged, "--policy", "constant", "--set", "action=c", "--estimators", "dr")
    plain = _estimates(*words)["dr"]
    bound = _estimates(
        *words, "--interval", "bernstein", "--reward-range", "0,1", "--floor", "0.1"
    )["dr"]
    assert (
        "too small" in bound["interval"]["refusal"]
    )  # 45 clients, and a bound for whatever they may do
    assert abs(bound["value"] - plain["value"]) < plain["standard_error"]


def test_an_action_that_was_not_available_cannot_have_been_taken(tmp_path):
    path = tmp_path / "decisions.csv"
    path.write_text("action,reward,propensity,could\na,1,0.5,a|b\nb,0,1,b|b\na,1,0.5,\n")
    assert _estimates(path, "--available", "could")["ips"]["events"] == 3
    path.write_text("action,reward,propensity,could\na,1,0.5,a|b\nb,0,0.5,a|c\n")
    with pytest.raises(DataError, match=r"column could, row 1: the action that was taken is not"):
        _run("evaluate", path, "--available", "could")
    with pytest.raises(DataError, match="no such file or folder"):
        _run("evaluate", tmp_path / "missing", "--split", "test")


def test_a_model_trained_from_logs_is_better_than_what_logged_them(logged, tmp_path):
    """Trained on the log's training users, evaluated on its test users."""
    for objective in ("regression", "weighted-regression", "doubly-robust"):
        model = tmp_path / f"{objective}.safetensors"
        rates = ("--set", "client.learning_rate=0.2", "--set", "server.learning_rate=0.05")
        said = _run(
            "train-offline", logged, "-o", model, "--objective", objective, "--rounds", "60", *rates
        )
        assert objective in said
        words = (
            "--policy",
            "epsilon-greedy",
            "--set",
            "epsilon=0.1",
            "--model",
            model,
            "--split",
            "test",
        )
        found = _estimates(logged, *words)
        earned = json.loads(_run("evaluate", logged, "--split", "test", "--json"))["logged_reward"]
        assert found["snips"]["interval"]["low"] > earned
        truth = 0.9 * 0.85 + 0.1 * OVERALL.mean()  # c is best, rain or not
        assert abs(found["dr"]["value"] - truth) < 3 * found["dr"]["standard_error"]
    reward_model = ("--reward-model", model, "--estimators", "dr", "--split", "test")
    assert abs(_estimates(logged, *words, *reward_model)["dr"]["value"] - truth) < 0.1


def test_models_that_do_not_fit_are_refused(logged, tmp_path):
    with pytest.raises(ConfigError, match="needs a model"):
        _run("evaluate", logged, "--policy", "softmax")
    with pytest.raises(DataError, match=r"No such file"):
        _run("evaluate", logged, "--policy", "softmax", "--model", tmp_path / "missing.safetensors")
    (tmp_path / "torn.safetensors").write_bytes(b"nothing")
    with pytest.raises(DataError, match="not a fedbandit model"):
        _run("evaluate", logged, "--policy", "softmax", "--model", tmp_path / "torn.safetensors")
    with pytest.raises(DataError, match="run folder"):
        _run("evaluate", logged, "--policy", "softmax", "--model", tmp_path)
    with pytest.raises(ConfigError, match="safetensors"):
        _run("train-offline", logged, "-o", tmp_path / "model.bin")


SMALL = {"rounds": 6, "deploy_every": 3, "clients_per_round": 8, "scenario": "scratch"}


def _small_words():
    sizes = {**SMALL, "client.max_examples": 16}
    return [word for key, value in sizes.items() for word in ("--set", f"{key}={value}")]


def test_tuning_says_what_it_chose_and_how_good_it_is(tmp_path):
    grid = ("--server", "0.01,0.05", "--client", "0.5", "--explore", "0.1,0.5", "--seeds", "1")
    words = ["tune", "so-scratch-epsilon-greedy", *grid, *_small_words(), "--workers", "1"]
    words += ["-q", "-o", tmp_path / "out"]
    said = _run(*words)
    heads = "server rate  client rate  epsilon  estimate  ± s.e.  simulated"
    [start] = [i for i, line in enumerate(said.splitlines()) if line == heads]
    table = said.splitlines()[start : start + 5]
    assert {line.split()[0] for line in table[1:]} == {"0.01", "0.05"}
    assert max(map(len, table)) <= 80
    assert said.count("<- chosen") == 1
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"candidates.csv", "report.html", "comparison.png", "differences.png"} <= written
    runs = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")}
    assert len(runs) == 4
    rows = json.loads(_run(*words, "--json"))
    assert [row["chosen"] for row in rows].count(True) == 1
    assert all(f"{row['simulated']:.4f}" in said for row in rows)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")} == runs
    assert "% of the best candidate's" in said
    assert "cannot be seen in a log of this size" in said
    assert ("use it: --set server.learning_rate=" in said) != (
        "the check refutes the choice" in said
    )
    with pytest.raises(ConfigError, match="exploration"):
        _run("tune", "so-scratch-greedy", "--explore", "1", *_small_words(), "-o", tmp_path)


def test_without_values_tuning_looks_around_what_the_policy_itself_explores():
    for policy, expected in {
        "falcon": [500, 1000, 2000],  # gamma's default
        "softmax": [0.025, 0.05, 0.1],
        "epsilon-greedy": [0.025, 0.05, 0.1],
    }.items():
        assert exploration_around(Config.build({"policy": {"name": policy}})) == pytest.approx(
            expected
        )
    wide = Config.build({"policy": {"name": "epsilon-greedy", "epsilon": 0.75}})
    assert exploration_around(wide) == [0.375, 0.75, 1.0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--cost", "-1"), "cost: must be 0 or more"),
        (("--seeds", "0"), "--seeds"),
        (
            ("--set", "scenario=drift", "--set", "drift.kind=appear", "--set", "drift.at=[3]"),
            "drift.kind",
        ),
        (
            ("--set", "privacy.mechanism=dp-fedavg", "--set", "privacy.noise_multiplier=0.5"),
            "privacy.mechanism",
        ),
        (("--server", "x"), "--server"),
    ],
)
def test_mistakes_in_tuning_are_named(words, message):
    with pytest.raises(ConfigError, match=message):
        _run(
            "tune", "so-scratch-epsilon-greedy", *_small_words(), "--set", "clipping.norm=1", *words
        )


def test_the_regret_of_a_run_folder(tmp_path):
    config = Config.build({**SMALL, "client": {"max_examples": 16}})
    run(config, tmp_path / "run")
    said = _run("regret", tmp_path / "run", "--rounds", "10", "--learning-rate", "2")
    best, ours = (
        float(said.split(words)[1].split(",")[0].split(":")[0]) for words in ("the class ", "ours ")
    )
    assert best >= ours >= 0


def test_the_regret_of_a_private_run_takes_more_rounds_than_its_plan_has(tmp_path):
    private = {
        "privacy": {"mechanism": "dp-fedavg", "noise_multiplier": 1.0},
        "clipping": {"norm": 0.5},
    }
    run(
        Config.build({**SMALL, "rounds": 2, "client": {"max_examples": 4}, **private}),
        tmp_path / "run",
    )
    assert "best of the class" in _run("regret", tmp_path / "run", "--rounds", "3")
    for words in (
        ("--rounds", "0"),
        ("--rounds", "-3"),
        ("--learning-rate", "-1"),
        ("--learning-rate", "0"),
    ):
        with pytest.raises(ConfigError, match=f"{words[0][2:].replace('-', '_')}: must be"):
            _run("regret", tmp_path / "run", *words)


def test_engines_are_closed_whatever_happens(tmp_path, monkeypatch):
    made, closed = [], []
    start, close = ThreadEngine.__init__, ThreadEngine.close
    monkeypatch.setattr(
        ThreadEngine, "__init__", lambda self, *given: (made.append(self), start(self, *given))[1]
    )
    monkeypatch.setattr(ThreadEngine, "close", lambda self: (closed.append(self), close(self))[1])
    run(Config.build({**SMALL, "rounds": 1, "client": {"max_examples": 4}}), tmp_path / "run")
    _run("theory", "--rounds", "2", "--every", "2", "--seeds", "1", "-o", tmp_path / "theory.svg")
    for words in (
        ("tune", "so-scratch-softmax", *_small_words(), "--cost", "-1"),
        ("regret", tmp_path / "run", "--rounds", "0"),
    ):
        with pytest.raises(ConfigError):
            _run(*words)
    assert len(made) >= 4
    assert {id(engine) for engine in made} <= {id(engine) for engine in closed}


def test_tune_and_theory_show_how_far_they_are(tmp_path):
    """Both were silent for half a minute."""
    grid = ("--server", "0.01,0.05", "--client", "0.5", "--explore", "0.1", "--no-check")
    commands = {
        "training from the log": (
            *("tune", "so-scratch-epsilon-greedy", *grid, *_small_words(), "-o", tmp_path / "a"),
        ),
        "theory": ("theory", "--rounds=4", "--every=2", "--seeds=1", "-o", tmp_path / "a.svg"),
    }
    for said, words in commands.items():
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exit_code == 0, result.output
        assert re.search(rf"^{said} +\d+%$", result.stderr, re.M), result.stderr
        assert f"{said}  took" in result.stderr
        quiet = CliRunner().invoke(app, [*(str(word) for word in words), "-q"])
        assert quiet.stderr == ""


def test_theory_and_drift_draw(tmp_path):
    said = _run(
        "theory", "--rounds", "6", "--every", "2,6", "--seeds", "1", "-o", tmp_path / "theory.png"
    )
    for words in ("ε-greedy", "FALCON", "eq. 9", "compare shapes"):
        assert words in said
    heads = ["every", "periods", "policy", "regret", "±", "sd", "last", "ε_fed", "bound"]
    assert said.splitlines()[0].split()[:9] == heads
    assert max(map(len, said.splitlines()[:-1])) <= 80  # the last one names files
    assert (tmp_path / "theory.csv").read_text().count("\n") == 1 + 2 * 3
    assert (tmp_path / "theory.png").read_bytes().startswith(b"\x89PNG")
    words = (
        "--rounds",
        "24",
        "--at",
        "13",
        "--policies",
        "greedy",
        "--seeds",
        "1",
        "--set",
        "clients_per_round=4",
    )
    said = _run("drift", *words, "-o", tmp_path / "drift.svg")
    assert "greedy" in said
    assert "<svg" in (tmp_path / "drift.svg").read_text()
    with pytest.raises(ConfigError, match="at least 10 rounds"):
        _run("drift", "--rounds", "30", "--at", "25")
    for words, message in {
        ("--every", "x"): "--every",
        ("--epsilon", "0"): "--epsilon",
        ("--log-class", "-1"): "--log-class",
        ("--gamma", "-1"): "--gamma",
        ("-o", "theory.foo"): r"--out: theory.foo must end in .png or .svg",
        ("-o", "theory"): "must end in",
    }.items():
        with pytest.raises(ConfigError, match=message):
            _run("theory", *words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("evaluate", "log.csv", "--interval", "x"), "'bootstrap', 'bernstein'"),
        (("evaluate", "log.csv", "--reward-range", "1"), "expected LOW,HIGH, not '1'"),
        (("tune", "so-scratch-softmax", "--estimator", "dm"), "'ips', 'snips', 'dr'"),
        (("regret", "run", "-o", "x.txt"), "--out: x.txt must end in .csv or .json or .parquet"),
    ],
)
def test_wrong_choices_are_one_line(words, said):
    fails_with_one_line(in_this_process(*words), said)


@pytest.mark.parametrize("name", ["found.csv", "found.json", "found.parquet"])
def test_a_table_is_written_to_the_file_that_is_asked_for(table, tmp_path, name):
    said = _run("evaluate", table, "--client", "user", "-o", tmp_path / name)
    assert "95% interval" in said
    assert [path.name for path in tmp_path.iterdir()] == [name]
    if name == "found.csv":
        first = (tmp_path / name).read_text().splitlines()[0]
        assert first.replace('"', "").startswith("estimator,value,standard_error,interval.low")
