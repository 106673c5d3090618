"""Results: from memory and from folders, as arrays, tables, pictures and summaries; damaged folders are named."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
from builders import random_text
from small_runs import make_run, small_config

from fedbandit import Results, run, simulate
from fedbandit.config import Config
from fedbandit.core.errors import ConfigError, DataError, FedbanditError
from fedbandit.core.files import read_lines
from fedbandit.results.reading import MetricsFile, columns_of, read_columns
from fedbandit.runs.folder import read_metrics

BASE = Config.build(
    {
        "scenario": "scratch",
        "rounds": 6,
        "deploy_every": 2,
        "clients_per_round": 5,
        "policy": {"name": "softmax", "beta": 0.1},
        "client": {"learning_rate": 0.5},
        "server": {"learning_rate": 0.05},
    }
)


def config(**settings):
    return BASE.with_values({key.replace("__", "."): value for key, value in settings.items()})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two policies with two seeds each, the second run of greedy stopped early."""
    root = tmp_path_factory.mktemp("results")
    for seed in (0, 1):
        run(config(seed=seed), root / "softmax" / f"seed-{seed}", dataset=random_text())
        greedy = config(seed=seed, policy__name="greedy", client__learning_rate=0.2)
        run(
            greedy,
            root / "greedy" / f"seed-{seed}",
            dataset=random_text(),
            until=4 if seed else None,
        )
    return root


@pytest.fixture(scope="module")
def softmax(folder):
    return Results.open(folder / "softmax")


def test_what_is_collected_is_what_a_run_folder_holds(folder):
    collected, kept = (
        simulate(config(), random_text()).collect(),
        Results.open(folder / "softmax" / "seed-0"),
    )
    assert kept.metrics == collected.metrics
    for name in (
        "round",
        "reward",
        "running_reward",
        "propensity",
        "client_reward.p50",
        "update_norm",
    ):
        np.testing.assert_array_equal(collected[name], kept[name])
        assert collected[name].shape == (6,)
    assert collected.summary().rows == kept.summary().rows
    assert collected.to_pandas().drop(columns="run").equals(kept.to_pandas().drop(columns="run"))


def test_everything_in_the_files_is_in_the_table(folder, softmax):
    table = softmax.to_arrow()
    assert table.num_rows == 12
    lines = [line for seed in (0, 1) for line in read_metrics(folder / "softmax" / f"seed-{seed}")]
    for name in lines[0]:
        if name not in ("client_reward", "rejected"):
            assert table[name].to_pylist() == [line[name] for line in lines], name
    assert table["client_reward.worst_decile"].to_pylist() == [
        line["client_reward"]["worst_decile"] for line in lines
    ]
    assert table["rejected"].to_pylist() == ["[]"] * 12
    frame = softmax.to_pandas(timings=True)
    timings = folder / "softmax" / "seed-0" / "timings.jsonl"
    seconds = [line["seconds"] for line in read_lines(timings)[1:]]
    assert frame["seconds.seconds"].tolist()[:6] == seconds
    assert "seconds.act" in frame


def test_the_table_has_a_column_for_every_setting_that_differs(folder):
    frame = Results.open(folder).to_pandas()
    assert frame.columns[:6].to_list() == [
        "run",
        "configuration",
        "seed",
        "policy.name",
        "policy.beta",
        "client.learning_rate",
    ]
    assert len(frame) == 6 + 6 + 6 + 4
    greedy = frame[frame["policy.name"] == "greedy"]
    assert set(greedy["run"]) == {"greedy/seed-0", "greedy/seed-1"}
    assert set(greedy["client.learning_rate"]) == {0.2}
    assert greedy["policy.beta"].isna().all()
    assert set(frame.groupby("configuration")["seed"].nunique()) == {2}


def test_a_setting_with_the_name_of_a_metric_does_not_hide_it():
    results = Results.concat(
        simulate(
            config(deploy_every=2, gate__confidence=0.5, gate__clients=n), random_text()
        ).collect()
        for n in (4, 5)
    )
    assert "gate.passes" in results
    assert "gate.clients" not in results  # or the next line would ask for `config.gate.clients`
    frame = results.to_pandas()
    assert set(frame["gate.clients"]) == {4, 5}
    clash = Results(tuple(_with_metric(run, "gate.clients", 7) for run in results.runs)).to_pandas()
    assert set(clash["gate.clients"]) == {7}
    assert set(clash["config.gate.clients"]) == {4, 5}


def _with_metric(record, name, value):
    return replace(record, columns={**record.columns, name: [value] * record.rounds})


def test_several_runs_are_a_matrix_and_can_be_taken_apart(softmax):
    assert softmax["reward"].shape == (2, 6)
    assert len(softmax) == 2
    for number, one in enumerate(softmax):
        assert len(one) == 1
        np.testing.assert_array_equal(one["reward"], softmax["reward"][number])
        np.testing.assert_array_equal(softmax[number]["reward"], one["reward"])
    assert [one.runs[0].seed for one in softmax[::-1]] == [1, 0]
    joined = Results.concat([softmax, softmax])
    assert [record.name for record in joined.runs] == [
        "seed-0",
        "seed-1",
        "seed-0 (2)",
        "seed-1 (2)",
    ]
    assert joined.where({"seed": 1})["reward"].shape == (2, 6)
    with pytest.raises(
        ConfigError, match=r"polcy\.name: no run has such a setting; did you mean policy\.name"
    ):
        joined.where({"polcy.name": "softmax"})


def test_runs_of_different_lengths_are_no_matrix(folder):
    results = Results.open(folder)
    with pytest.raises(
        DataError,
        match=r"reward: .* different numbers of rounds \(greedy/seed-1 4, greedy/seed-0 6\)",
    ):
        _ = results["reward"]
    assert [len(one["reward"]) for one in results] == [6, 4, 6, 6]


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("runing_reward", "runing_reward: no round has such a metric; did you mean running_reward"),
        ("client_reward", r"it has parts: client_reward\.p10, client_reward\.p25"),
        ("rejected", r"rejected: is not a number; to_pandas\(\) has it"),
    ],
)
def test_what_is_no_metric_is_refused(softmax, metric, message):
    with pytest.raises(DataError, match=message):
        _ = softmax[metric]


def test_rounds_without_a_value_are_not_a_number():
    results = simulate(config(clipping__enabled=False), random_text()).collect()
    assert np.isnan(results["clip_norm"]).all()
    assert results.to_pandas()["clip_norm"].isna().all()
    assert "clip_norm" in results
    assert "reward" in results
    assert "no such" not in results


def test_the_summary_has_a_row_per_configuration(folder):
    results = Results.open(folder)
    summary = results.summary()
    greedy, softmax = summary.rows  # the best comes first
    assert greedy["running_reward"] > softmax["running_reward"]
    final = results.where({"policy.name": "softmax"})["running_reward"][:, -1]
    assert (softmax["configuration"], softmax["runs"], softmax["rounds"]) == ("softmax", 2, 6)
    assert softmax["running_reward"] == pytest.approx(final.mean())
    assert softmax["standard_error"] == pytest.approx(final.std(ddof=1) / np.sqrt(2))
    assert (greedy["configuration"], greedy["runs"]) == (
        "greedy",
        1,
    )  # the other one is not finished
    lines = str(summary).splitlines()
    assert lines[0].split() == ["configuration", "runs", "rounds", "running", "reward"]
    assert f"{final.mean():.4f} ± {softmax['standard_error']:.4f}" in lines[2]
    assert lines[3] == "note: greedy/seed-1: unfinished, after 4 of 6 rounds"
    alone = results[0].summary().rows[0]
    assert alone["standard_error"] is None


def test_held_out_metrics_are_the_last_ones():
    data = random_text()
    results = simulate(config(evaluate_every=4), replace(data, test=data.train)).collect()
    values = results["test_recall_at_5"]
    assert np.isnan(values).tolist() == [True, True, True, False, True, False]
    assert results.summary().rows[0]["test_recall_at_5"] == values[-1]
    line = results.plot("test_recall_at_5").axes[0].get_lines()[-1]
    assert line.get_xdata().tolist() == [4, 6]  # rounds without a value do not break the curve


def test_a_plot_has_a_curve_per_configuration(folder, tmp_path):
    results = Results.open(folder)
    figure = results.plot(path=tmp_path / "runs.png")
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["softmax", "greedy"]
    curves = {line.get_label(): line.get_xdata() for line in axes.get_lines()}
    # Over finished runs: the seed that stopped after four rounds is not mixed in.
    assert (len(curves["softmax"]), len(curves["greedy"])) == (6, 6)
    with pytest.raises(ConfigError, match=r"must end in \.png or \.svg"):
        results.plot(path=tmp_path / "runs.pdf")


def test_damaged_and_unfinished_folders_are_named_and_not_fatal(tmp_path):
    for name in ("good", "torn", "damaged", "bad config", "no rounds"):
        run(config(), tmp_path / name, dataset=random_text())
    torn, damaged = tmp_path / "torn" / "metrics.jsonl", tmp_path / "damaged" / "metrics.jsonl"
    torn.write_bytes(torn.read_bytes()[:-10])  # the last line is still being written
    (tmp_path / "torn" / "summary.json").unlink()
    damaged.write_text("{]\n" + damaged.read_text())
    (tmp_path / "bad config" / "config.toml").write_text("= 3")
    (tmp_path / "no rounds" / "metrics.jsonl").unlink()
    (tmp_path / "no rounds" / "summary.json").unlink()
    (tmp_path / "no rounds" / "error.json").write_text(
        json.dumps({"kind": "Diverged", "error": "diverged at round 1"})
    )
    results = Results.open(tmp_path)
    assert [record.name for record in results.runs] == ["good", "no rounds", "torn"]
    problems = "\n".join(results.problems)
    assert "bad config: damaged" in problems
    assert "damaged: damaged" in problems
    assert "torn: unfinished, after 5 of 6 rounds" in problems
    assert "no rounds: failed after 0 of 6 rounds: diverged at round 1" in problems
    assert len(results.problems) == 4
    assert "; 4 problems>" in repr(results)
    assert len(results.to_pandas()) == 6 + 5
    (row,) = results.summary().rows
    assert (row["runs"], row["rounds"]) == (1, 6)
    results.plot()
    only_damaged = Results.open(tmp_path / "damaged")
    assert repr(only_damaged) == "<Results: no runs; 1 problem>"
    assert "damaged" in str(only_damaged.summary())
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty: there are no runs"):
        Results.open(tmp_path / "empty")
    with pytest.raises(DataError, match="nowhere: no such folder"):
        Results.open(tmp_path / "nowhere")


def test_what_they_look_like(folder, softmax):
    assert repr(softmax) == "<Results: 2 runs of softmax, 6 rounds>"
    assert repr(softmax[0]) == "<Results: seed-0, 6 rounds>"
    expected = "<Results: 4 runs of 2 configurations (softmax, greedy), 4 to 6 rounds; 1 problem>"
    assert repr(Results.open(folder)) == expected
    several = Results.concat(
        simulate(config(rounds=1, policy__beta=b / 10), random_text()).collect()
        for b in range(1, 7)
    )
    assert "6 runs of 6 configurations (softmax beta=0.1, softmax beta=0.2," in repr(several)
    assert ", ...)" in repr(several)


@pytest.mark.parametrize(
    ("module", "call"),
    [
        ("pandas", "to_pandas"),
        ("pyarrow", "to_arrow"),
        ("matplotlib.backends.backend_agg", "plot"),
    ],
)
def test_a_missing_library_names_the_extra(softmax, monkeypatch, module, call):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        FedbanditError,
        match=r"needs fedbandit\[simulation\]: pip install 'fedbandit\[simulation\]'",
    ):
        getattr(softmax, call)()


def test_where_a_run_was_computed_makes_no_other_configuration(tmp_path):
    run(config(threads=1), tmp_path / "one", dataset=random_text())
    run(config(threads=2, seed=1), tmp_path / "two", dataset=random_text())
    results = Results.open(tmp_path)
    assert len(results.summary().rows) == 1
    assert "threads" not in results.to_pandas()


def test_runs_of_different_length_are_not_averaged(tmp_path):
    for seed in range(2):
        make_run(tmp_path / f"seed-{seed}", seed=seed, rounds=6)
    run(small_config(seed=2, rounds=6), tmp_path / "paused", dataset=random_text(), until=2)
    results = Results.open(tmp_path)
    summary = results.summary()
    (row,) = summary.rows
    finished = [one["running_reward"][-1] for one in results if one.runs[0].name != "paused"]
    assert (row["runs"], row["rounds"]) == (2, 6)
    assert row["running_reward"] == pytest.approx(np.mean(finished))
    assert "paused: unfinished, after 2 of 6 rounds" in repr(summary)
    line = results.plot().axes[0].lines[-1]
    assert line.get_xdata()[-1] == 6
    np.testing.assert_allclose(line.get_ydata()[-1], np.mean(finished))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.toml", "policy = " + "[" * 100_000),
        ("config.toml", 'seed = "x"'),
        ("metrics.jsonl", '{"round": "1"}\n'),
        ("metrics.jsonl", "[" * 100_000 + "\n"),
        ("summary.json", "{}"),
    ],
)
def test_a_damaged_folder_is_left_out_and_named(tmp_path, name, text):
    for folder in ("bad", "good"):
        make_run(tmp_path / folder, rounds=2)
    (tmp_path / "bad" / name).write_text(text)
    results = Results.open(tmp_path)
    assert [one.name for one in results.runs] == ["good"]
    assert len(results.problems) == 1
    assert "damaged" in results.problems[0]


ODD_LINES = {
    "plain": {"reward": 0.25, "rejected": [], "spread": {"p50": 0.5, "inner": {"least": 0}}},
    "missing": {"reward": None},
    "a date": {"reward": 0.5, "note": "2026-11-18"},
    "a list of objects": {"rejected": [{"version": 1}, {"why": "worse"}]},
    "mixed": {"reward": "none"},
    "large": {"reward": 10**400},
    "not a number": {"reward": float("nan")},
    "a text for an object": {"spread": "wide"},
}


@pytest.mark.parametrize("odd", ODD_LINES)
def test_long_files_are_read_as_short_ones_are(tmp_path, odd):
    """Arrow reads many lines at a time; whatever it would read otherwise is left to Python."""
    plain, number = ODD_LINES["plain"], 700
    lines = [{"round": i, **(ODD_LINES[odd] if i == number else plain)} for i in range(1, 1201)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [{"run": "a"}, *lines]))
    found, wanted = read_columns(path, "a"), columns_of(lines)
    assert list(found) == list(wanted)
    for name, values in wanted.items():
        np.testing.assert_equal(found[name], values)


def test_a_damaged_line_of_a_long_file_is_named(tmp_path):
    lines = [json.dumps({"round": i, "reward": 0.5, "running_reward": 0.5}) for i in range(1, 1201)]
    lines[699] = lines[699][:-5]
    (tmp_path / "metrics.jsonl").write_text("\n".join(['{"run": "a"}', *lines]) + "\n")
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.follow()
    assert metrics.problem is not None
    assert metrics.problem.startswith("line 700 of metrics.jsonl is damaged")
