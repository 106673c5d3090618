"""Personal parts against a few lines of numpy; the same bits wherever they run; what is refused."""

import json

import numpy as np
import pytest
from core_samples import config, images, played, text

from fedbandit.algorithms.personal import gains
from fedbandit.assembly.experiment import build_experiment
from fedbandit.core.contexts import Contexts
from fedbandit.core.errors import ConfigError
from fedbandit.core.prediction import Prediction
from fedbandit.core.process import Stopwatch
from fedbandit.data import open_dataset
from fedbandit.data.embedded import gallery
from fedbandit.engines import ThreadEngine
from fedbandit.events import Events
from fedbandit.federated.memory import Memory
from fedbandit.federated.round import run_round
from fedbandit.report.report import write_report
from fedbandit.runs.run import execute
from fedbandit.simulation import simulate

PERSONAL = {"algorithm__name": "personal", "algorithm__least": 4, "rounds": 6}
KINDS = {
    "bias on text": (text, {**PERSONAL}),
    "last layer on text": (text, {**PERSONAL, "algorithm__part": "last-layer"}),
    "bias of an mlp": (images, {**PERSONAL, "model__name": "mlp", "model__hidden": 5}),
    "last layer of an mlp, quantised": (
        images,
        {
            **PERSONAL,
            "model__name": "mlp",
            "model__hidden": 5,
            "algorithm__part": "last-layer",
            "compression__name": "quantize",
        },
    ),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def events_of(actions, rewards, propensities, contexts=None):
    n = len(actions)
    return Events(
        bounds=np.array([0, n]),
        contexts=Contexts(np.zeros((n, 1))) if contexts is None else contexts,
        actions=np.array(actions),
        rewards=np.array(rewards, np.float32),
        propensities=np.array(propensities),
        versions=np.zeros(n, np.int32),
        fresh=np.ones(n, bool),
    )


def test_the_gain_is_right_on_average_for_a_rule_that_explores():
    rng = np.random.default_rng(0)
    truth, deployed, own = np.array([0.2, 0.7]), np.array([0.5, 0.4]), np.array([0.1, 0.6])
    n = 40_000
    actions = rng.integers(0, 2, n)
    rewards = rng.random(n) < truth[actions]
    found = gains(
        events_of(actions, rewards, np.full(n, 0.5)),
        Prediction(np.tile(deployed, (n, 1))),
        Prediction(np.tile(own, (n, 1))),
    )
    assert abs(found.mean() - 0.5) < 3 * found.std() / np.sqrt(n)


def test_the_gain_over_candidates_is_that_of_fixed_actions():
    rng = np.random.default_rng(1)
    mean, own = rng.random((9, 4)), rng.random((9, 4))
    events = events_of(rng.integers(0, 4, 9), rng.random(9), rng.random(9) / 2 + 0.5)
    bounds = np.arange(10) * 4
    flat = [Prediction(scores.reshape(-1), bounds=bounds) for scores in (mean, own)]
    expected = gains(events, Prediction(mean), Prediction(own))
    np.testing.assert_allclose(gains(events, *flat), expected, atol=1e-12)
    same = gains(events, Prediction(mean), Prediction(2 * mean))
    assert not same.any()  # who chooses the same gains nothing


def reference_parts(experiment, rounds, size, least):
    """Parts and records of all clients, in plain loops over dense rows."""
    work, memory, state = (
        experiment.bandit.work,
        {},
        experiment.bandit.start(experiment.initial_weights()),
    )
    store, sums = Memory(), np.zeros(2)
    for number in range(1, rounds + 1):
        cohort, w = experiment.bandit.cohorts.draw(number), state.server_state["weights"]
        broadcast, usual, added = work.broadcast(state), sums[1] / max(sums[0], 1), np.zeros(2)
        for client in cohort:
            own = work.act(np.array([client]), broadcast, None, store.read([client], number))
            if not len(own):
                continue
            part, record = memory.get(client, (None, np.zeros(3)))
            start = w.copy()
            start[-size:] += 0 if part is None else part
            new = np.zeros(2)
            if part is not None:
                both = [work.predictor.predict(v, own.contexts) for v in (w, start)]
                new = np.array([len(own), gains(own, *both).sum()])
            count, total = 0.8 * record[:2] + new
            shrunk = (total + least * usual) / (count + least)
            end, rate, b = (
                start.copy(),
                work.learner.settings.learning_rate / 4,
                work.learner.settings.batch_size,
            )
            x = np.zeros((len(own), experiment.layout.shapes[0][1][0]))
            np.add.at(
                x,
                (own.contexts.shared.row_of_entry(), own.contexts.shared.ids),
                own.contexts.shared.values,
            )
            views = experiment.layout.split(end)
            for first in range(0, len(own), b):
                rows, a = slice(first, first + b), own.actions[first : first + b]
                scores = (x[rows] * views["weight"][:, a].T).sum(1) + views["bias"][a]
                errors = 2 / len(a) * (scores - own.rewards[rows])
                np.subtract.at(views["weight"].T, a, rate * errors[:, None] * x[rows])
                np.subtract.at(views["bias"], a, rate * errors)
            moved = (0 if part is None else part) + (end - start)[-size:]
            moved /= 1 + rate * -(-len(own) // b) * 10 / len(own)
            memory[client] = moved, np.array([count, total, count >= least and shrunk > 0])
            added += new
        state, _ = run_round(experiment.bandit, state, ThreadEngine(1), Stopwatch(), store)
        sums = sums + added
    return memory, store


@pytest.mark.parametrize("part", ["bias", "last-layer"])
def test_parts_and_what_they_are_adopted_by_are_those_of_plain_numpy(part):
    chosen = config(**PERSONAL, algorithm__part=part)
    experiment = build_experiment(chosen, text())
    size = experiment.layout.shapes[-1][1][0] if part == "bias" else experiment.layout.size
    expected, store = reference_parts(experiment, chosen.rounds, size, 4)
    found = store.read(expected, chosen.rounds + 1)
    assert {int(client) for client in expected} == set(found)
    for client, (moved, record) in expected.items():
        np.testing.assert_allclose(np.asarray(found[client]["part"]), moved, atol=1e-9)
        np.testing.assert_allclose(np.asarray(found[client]["record"]), record, atol=1e-9)
    adopted = [record[2] for _, record in expected.values()]
    assert 0 < sum(adopted) < len(adopted)


@every_kind
def test_threads_a_pause_and_the_command_line_give_the_same_bytes(kind, tmp_path):
    data, settings = KINDS[kind]
    chosen, dataset = config(**settings), data()
    expected = [json.dumps(line) for line in simulate(chosen, dataset)]
    one = simulate(chosen.with_values({"threads": 1}), dataset)
    assert [json.dumps(line) for line in one] == expected
    assert one.state.server_state["gains"][0] > 0
    for until in (3, None):
        execute(chosen, tmp_path / "paused", dataset=dataset, until=until)
    written = (tmp_path / "paused" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert written[1:] == expected


def test_what_is_sent_is_the_update_of_fedavg_until_somebody_acts_with_a_part():
    rounds, run = played(config(**{**PERSONAL, "algorithm__least": 10_000}), text())
    plain, fedavg = played(config(rounds=6), text())
    assert rounds == plain
    np.testing.assert_array_equal(run.state.weights, fedavg.state.weights)


def test_a_private_run_sends_no_gains():
    private = {"mechanism": "dp-fedavg", "noise_multiplier": 1.0, "delta": 1e-3}
    chosen = config(**PERSONAL, clipping__norm=0.5, privacy=private)
    run = simulate(chosen, text())
    assert len(list(run)) == 6
    assert not run.state.server_state["gains"].any()


@pytest.mark.slow
def test_ray_gives_the_same_bytes(tmp_path):
    pytest.importorskip("ray")
    from fedbandit.engines import RayEngine

    made = open_dataset(str(gallery.generate(tmp_path / "gallery", users=40)))
    chosen = config(**{**PERSONAL, "algorithm__part": "last-layer"})
    expected = [json.dumps(line) for line in simulate(chosen, made)]
    engine = RayEngine(workers=2)
    try:
        assert [json.dumps(line) for line in simulate(chosen, made, engine=engine)] == expected
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model__name": "linear-heads"}, "needs model.name = linear or mlp"),
        ({"algorithm__part": "first-layer"}, "part"),
        ({"algorithm__least": 0}, "least must be at least 1"),
        ({"mode": "population"}, "held in the past is not known"),
    ],
)
def test_what_cannot_be_personal_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        build_experiment(config(**{**PERSONAL, **settings}), text())


def test_candidates_share_a_bias(tmp_path):
    made = open_dataset(str(gallery.generate(tmp_path / "gallery", users=12)))
    with pytest.raises(ConfigError, match="candidates share one bias"):
        build_experiment(config(**PERSONAL), made)
    lines = list(simulate(config(**PERSONAL, algorithm__part="last-layer"), made))
    assert len(lines) == 6


def test_the_report_shows_who_gained_and_who_lost(tmp_path):
    chosen = config(**{**PERSONAL, "rounds": 12})
    execute(chosen, tmp_path / "runs" / "one", dataset=text())
    told = json.loads((tmp_path / "runs" / "one" / "summary.json").read_text())["personal"]
    run = json.loads((tmp_path / "runs" / "one" / "summary.json").read_text())["run"]
    memory = Memory(tmp_path / "runs" / "one" / "memory.sqlite", run)
    records = [np.asarray(own["record"]) for own in memory.read(range(100), 13).values()]
    memory.close()
    assert sum(row["clients"] for row in told) == len(records)
    acting = [total / count for count, total, adopted in records if adopted]
    assert sum(row["adopted"] for row in told) == len(acting) > 0
    assert sum(row["gained"] for row in told) == sum(gain > 0 for gain in acting) > 0
    assert sum(row["lost"] for row in told) == sum(gain < 0 for gain in acting)
    mean = sum(row["gain"] * row["adopted"] for row in told) / len(acting)
    assert mean == pytest.approx(np.mean(acting))
    page = write_report([tmp_path / "runs"], tmp_path / "report.html").read_text()
    cells = page.split("Who gained by a model of their own")[1].split("</section>")[0]
    assert f">{told[0]['clients']}<" in cells
    assert f">{told[-1]['gain']:.4f}<" in cells
    execute(config(rounds=2), tmp_path / "other", dataset=text())
    other = write_report([tmp_path / "other"], tmp_path / "other.html").read_text()
    assert "Who gained" not in other
