"""The report's file and the live page's server, as far as they can be told without a browser."""

import http.client
import json
import os
import platform
import threading
import tomllib
from contextlib import contextmanager

import pytest
from builders import random_text
from small_runs import find_runs, make_run, small_config, three_policies

from fedbandit.assembly.experiment import build_experiment
from fedbandit.core.errors import ConfigError, DataError, Diverged
from fedbandit.core.identity import run_id
from fedbandit.report.report import outcomes, write_report
from fedbandit.report.watch import Watcher, make_server
from fedbandit.runs import index as collection
from fedbandit.runs.folder import RunFolder
from fedbandit.runs.index import grouped
from fedbandit.runs.local_runner import LocalRunner
from fedbandit.runs.run import run
from fedbandit.studies.search import SearchCandidate, race


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "runs"
    three_policies(folder)
    return folder


def test_runs_are_grouped_by_all_but_their_seed(runs):
    groups = grouped(list(find_runs([runs])))
    assert [group.label for group in groups] == ["softmax", "falcon", "epsilon-greedy", "baseline"]
    assert [[run.config.seed for run in group.runs] for group in groups] == [[0, 1]] * 4
    assert {run.status for group in groups for run in group.runs} == {"finished"}


def test_labels_say_no_more_than_sets_configurations_apart(tmp_path):
    make_run(tmp_path / "a", policy__beta=0.1, client__learning_rate=0.1)
    make_run(tmp_path / "b", policy__beta=0.5, client__learning_rate=0.2)
    labels = [group.label for group in grouped(list(find_runs([tmp_path])))]
    assert labels == ["softmax beta=0.1", "softmax beta=0.5"]
    make_run(tmp_path / "c", policy__beta=0.5, client__learning_rate=0.3)
    make_run(
        tmp_path / "d",
        policy__beta=0.5,
        client__learning_rate=0.3,
        objective__name="weighted-regression",
    )
    labels = [group.label for group in grouped(list(find_runs([tmp_path])))]
    assert labels == [
        "softmax beta=0.1, regression, client.rate=0.1",
        "softmax beta=0.5, regression, client.rate=0.2",
        "softmax beta=0.5, regression, client.rate=0.3",
        "softmax beta=0.5, weighted-regression, client.rate=0.3",
    ]


def test_a_report_holds_everything_and_asks_for_nothing(runs, tmp_path):
    page = write_report([runs], tmp_path / "deep" / "report.html").read_text(encoding="utf-8")
    for part in (
        "running average",
        "policy.beta",
        "Environment",
        "fedbandit run run-1.toml --seed 0",
        "in memory",
    ):
        assert part in page
    assert "Content-Security-Policy" in page
    assert "default-src 'none'" in page
    for request in ("src=", "@import", "url(", "fetch("):
        assert request not in page
    assert "Privacy spent" not in page
    assert len(page) < 200_000


def test_a_report_needs_runs(tmp_path):
    with pytest.raises(DataError, match="no runs"):
        write_report([tmp_path], tmp_path / "report.html")
    with pytest.raises(DataError, match="no such folder"):
        write_report([tmp_path / "nowhere"], tmp_path / "report.html")


def test_names_from_files_cannot_become_markup(tmp_path):
    evil = tmp_path / "<script>alert(1)<" / "script>"
    make_run(evil, policy__beta=0.2)
    (evil / "error.json").write_text(
        json.dumps({"kind": "x", "error": "</script><b>"}), encoding="utf-8"
    )
    (evil / "summary.json").unlink()
    page = write_report([tmp_path], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert "</script><b>" not in page


def test_states_of_a_run(tmp_path):
    config = small_config()
    dataset = random_text()

    def status() -> str:
        return next(find_runs([tmp_path])).status

    run(config, tmp_path / "run", dataset=dataset, until=4)
    assert status() == "stopped"
    with RunFolder(tmp_path / "run", build_experiment(config, dataset)):
        assert status() == "running"
    run(config, tmp_path / "run", dataset=dataset)
    assert status() == "finished"


def test_a_lock_is_known_by_its_inode_and_one_of_another_machine_by_what_it_writes(
    tmp_path, monkeypatch
):
    run(small_config(), tmp_path / "run", dataset=random_text(), until=4)
    lock = tmp_path / "run" / ".lock"

    def status() -> str:
        return next(find_runs([tmp_path])).status

    table = tmp_path / "locks"
    monkeypatch.setattr(collection, "_LOCKS", table)
    table.write_text(
        f"1: FLOCK  ADVISORY  WRITE 7 00:99:{lock.stat().st_ino} 0 EOF\n"
    )  # as btrfs names the device
    assert status() == "running"
    for locks in ("1: FLOCK  ADVISORY  WRITE 7 00:99:0 0 EOF\n", None):
        table.unlink() if locks is None else table.write_text(locks)
        lock.write_text("")
        assert status() == "stopped"
        lock.write_text("another-machine")
        assert status() == "running"
        for path in (tmp_path / "run").iterdir():
            os.utime(path, (0, 0))
        assert status() == "stopped"
    table.write_text("")
    lock.write_text(platform.node())  # killed here
    assert status() == "stopped"


def test_what_privacy_was_spent_is_in_the_table(tmp_path):
    make_run(
        tmp_path / "private",
        clipping__norm=0.5,
        privacy__mechanism="dp-fedavg",
        privacy__noise_multiplier=1.0,
        privacy__delta=1e-3,
        rounds=2,
    )
    make_run(tmp_path / "plain", rounds=2)
    spent = json.loads((tmp_path / "private" / "summary.json").read_text())["privacy"][
        "epsilon_pld"
    ]
    page = outcomes(grouped(list(find_runs([tmp_path]))))
    assert "epsilon pld" in page
    assert f"{spent:.4f}" in page


def test_a_diverged_run_says_so_and_stays_so(tmp_path):
    wild = small_config(client__learning_rate=1e30, clipping__enabled=False)
    for _ in range(2):
        with pytest.raises(Diverged, match="diverged at round"):
            run(wild, tmp_path / "wild", dataset=random_text())
        found = next(find_runs([tmp_path]))
        assert found.status == "failed"
        assert "diverged at round" in found.error


def test_watching_reads_only_what_is_new_and_survives_cuts(tmp_path):
    dataset = random_text()
    run(small_config(), tmp_path / "run", dataset=dataset, until=8)
    watcher = Watcher(tmp_path)
    assert watcher.now()["runs"][0]["rounds"] == 8
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
    metrics.write_text(
        "".join(lines[:4]) + lines[4][:10], encoding="utf-8"
    )  # cut, and torn while it is written
    assert watcher.now()["runs"][0]["rounds"] == 3
    run(small_config(), tmp_path / "fresh", dataset=dataset)
    now = watcher.now()
    assert [one["status"] for one in now["runs"]] == ["finished", "stopped"]
    assert now["charts"]["reward"]["series"][0]["mean"]


@pytest.mark.parametrize("damage", ["[1]\n", "{not json\n"])
def test_a_damaged_run_does_not_hide_the_others(tmp_path, damage):
    make_run(tmp_path / "good", rounds=3)
    make_run(tmp_path / "bad", rounds=3)
    with open(tmp_path / "bad" / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(damage)
    now = Watcher(tmp_path).now()
    assert {run["name"]: run["rounds"] for run in now["runs"]} == {"good": 3}
    assert [one["name"] for one in now["problems"]] == ["bad"]
    assert now["charts"]["reward"]["series"][0]["mean"]
    assert [run.name for run in find_runs([tmp_path])] == ["good"]


def test_many_configurations_are_shown_in_part(tmp_path):
    for number in range(14):
        make_run(tmp_path / f"run-{number:02d}", policy__beta=0.1 + number / 100, rounds=4)
    now = Watcher(tmp_path).now()
    assert (now["configurations"], now["shown"], len(now["runs"])) == (14, 8, 14)
    shown = now["charts"]["reward"]["series"]
    worst = min(now["runs"], key=lambda run: run["running_reward"])
    assert len(shown) == 8
    assert all(series["mean"][-1] > worst["running_reward"] for series in shown)


def test_watching_an_empty_folder_and_strange_files(tmp_path):
    assert Watcher(tmp_path).now()["runs"] == []
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.toml").write_text("this is = = not toml", encoding="utf-8")
    assert Watcher(tmp_path).now()["runs"] == []


def test_links_that_lead_out_of_the_folder_are_not_followed(tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    make_run(outside / "secret")
    (inside / "link").symlink_to(outside / "secret")
    make_run(inside / "run")
    (inside / "run" / "metrics.jsonl").unlink()
    (inside / "run" / "metrics.jsonl").symlink_to(outside / "secret" / "metrics.jsonl")
    assert Watcher(inside).now()["runs"] == []


@contextmanager
def _serving(folder):
    with make_server(folder) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def _get(port, path, host=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{port}"})
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer, body


def test_the_server_serves_its_page_and_nothing_else(runs):
    with _serving(runs) as port:
        page, text = _get(port, "/")
        assert page.status == 200
        assert "default-src 'none'" in page.headers["Content-Security-Policy"]
        assert "<table" in text
        answer, body = _get(port, "/runs.json")
        assert len(json.loads(body)["runs"]) == 8
        for path in (
            "/softmax/seed-0/config.toml",
            "/../../etc/passwd",
            "//etc/passwd",
            "/runs.json/..",
            "/%2e%2e/",
        ):
            answer, _ = _get(port, path)
            assert answer.status == 404
        assert _get(port, "/runs.json", host="evil.example:80")[0].status == 403


def test_the_server_refuses_folders_that_are_not_there_and_taken_ports(runs, tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        make_server(tmp_path / "nowhere")
    with make_server(runs) as server, pytest.raises(ConfigError, match="--port"):
        make_server(runs, server.server_address[1])


def test_labels_and_tables_say_what_is_not_set_and_what_is_not_private(tmp_path):
    private = {
        "privacy__mechanism": "dp-fedavg",
        "privacy__noise_multiplier": 1.0,
        "privacy__delta": 1e-3,
    }
    make_run(tmp_path / "default", policy={"name": "softmax"}, rounds=2)
    make_run(tmp_path / "beta", policy__beta=0.3, rounds=2)
    make_run(tmp_path / "private", policy__beta=0.3, rounds=2, clipping__norm=0.5, **private)
    groups = grouped(list(find_runs([tmp_path])))
    assert sorted(group.label for group in groups) == [
        "softmax beta=0.3, dp-fedavg",
        "softmax beta=0.3, not private",
        "softmax default beta, not private",
    ]
    page = write_report([tmp_path], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "beta=-" not in page
    assert ">none</td>" not in page
    assert "none" not in [
        value for run in Watcher(tmp_path).now()["runs"] for value in run["values"]
    ]
    assert (
        "±" not in page.split('class="headline"')[1].split("</div>")[0]
    )  # of one seed nothing is known
    assert "one seed cannot tell whether that is chance" in page


def test_the_first_thing_a_report_says_is_who_came_first(runs, tmp_path):
    page = write_report([runs], tmp_path / "report.html").read_text(encoding="utf-8")
    final = {
        group.label: [run.last["running_reward"] for run in group.runs]
        for group in grouped(list(find_runs([runs])))
    }
    best = max(final, key=lambda label: sum(final[label]))
    first = page.split('class="headline"')[1].split("</div>")[0]
    assert best in first
    assert f"{sum(final[best]) / 2:.4f} ± " in first
    assert "shared seeds" in first
    assert page.index('class="headline"') < page.index("<table")


def test_a_report_of_many_configurations_gives_eight_a_colour(tmp_path):
    for number in range(10):
        make_run(tmp_path / f"run-{number}", policy__beta=0.1 + number / 100, rounds=3)
    page = write_report([tmp_path], tmp_path / "report.html").read_text(encoding="utf-8")
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    series = data["charts"]["running_reward"]["series"]
    assert [one["colour"] is not None for one in series] == [True] * 8 + [False] * 2
    assert len({(one["colour"], one["dashed"]) for one in series[:8]}) == 8
    assert [one["mean"][-1] for one in series] == sorted(
        (one["mean"][-1] for one in series), reverse=True
    )


def test_rows_have_what_differs_and_chosen_runs_are_compared(tmp_path):
    for beta in (0.1, 0.4):
        for seed in range(2):
            make_run(tmp_path / f"{beta}-{seed}", policy__beta=beta, seed=seed, rounds=3)
    watcher = Watcher(tmp_path)
    now = watcher.now()
    assert now["parameters"] == ["policy.beta", "seed"]
    assert [run["values"] for run in now["runs"]] == [[0.1, 0], [0.1, 1], [0.4, 0], [0.4, 1]]
    assert now["comparison"]["rows"] == []
    chosen = watcher.now(["0.1-0", "0.4-0", "../../etc/passwd"])
    assert chosen["comparison"]["keys"] == ["policy.beta"]
    assert [one["name"] for one in chosen["comparison"]["rows"]] == ["0.1-0", "0.4-0"]
    assert [one["label"] for one in chosen["charts"]["reward"]["series"]] == ["0.1-0", "0.4-0"]
    with _serving(tmp_path) as port:
        answer, body = _get(port, "/runs.json?run=0.4-1&run=0.1-1")
        assert answer.status == 200
        assert len(json.loads(body)["comparison"]["rows"]) == 2


@pytest.mark.slow
def test_a_thousand_runs_are_read_once_and_answered_in_bounded_memory(tmp_path, monkeypatch):
    make_run(tmp_path / "run-0000", rounds=3)
    text = (tmp_path / "run-0000" / "config.toml").read_text(encoding="utf-8")
    environment = json.loads((tmp_path / "run-0000" / "environment.json").read_text())
    for number in range(1, 1000):
        folder = tmp_path / f"run-{number:04d}"
        folder.mkdir()
        changed = text.replace("beta = 0.1", f"beta = {0.1 + number % 40 / 100}").replace(
            "seed = 0", f"seed = {number}"
        )
        (folder / "config.toml").write_text(changed, encoding="utf-8")
        run = run_id(tomllib.loads(changed), environment)
        for name in ("environment.json", "summary.json", "metrics.jsonl", "timings.jsonl"):
            own = (tmp_path / "run-0000" / name).read_text(encoding="utf-8")
            (folder / name).write_text(own.replace(environment["run"], run), encoding="utf-8")
    watcher = Watcher(tmp_path)
    now = watcher.now()
    assert len(now["runs"]) == 1000
    assert now["shown"] == len(now["charts"]["reward"]["series"]) == 8
    assert len(watcher._files) <= 8 * 16  # whole files are read for the curves alone
    assert len(json.dumps(now)) < 1_000_000
    parsed = []
    loads = tomllib.loads
    monkeypatch.setattr(tomllib, "loads", lambda text: parsed.append(text) or loads(text))
    again = watcher.now()
    assert again["runs"] == now["runs"]
    assert parsed == []  # no configuration is parsed again


def test_columns_begin_with_what_differs_most_and_rates_are_among_them(tmp_path):
    for number in range(4):
        rates = {
            "client__learning_rate": 0.1 + number / 10,
            "server__learning_rate": 0.01 + number % 2,
        }
        make_run(tmp_path / str(number), **rates, rounds=3)
    now = Watcher(tmp_path).now()
    assert now["parameters"] == ["client.learning_rate", "server.learning_rate"]
    assert "rounds=3" in now["common"]  # a search looks at these, too
    assert not any("learning_rate" in setting.partition("=")[0] for setting in now["common"])


def test_members_of_a_sweep_are_called_by_what_sets_them_apart(tmp_path):
    for beta, digest in ((0.1, "0123456789"), (0.4, "abcdef0123")):
        make_run(tmp_path / f"softmax-{digest}" / "seed-0", policy__beta=beta, rounds=3)
    rows = Watcher(tmp_path).now()["runs"]
    assert [row["title"] for row in rows] == [
        "softmax beta=0.1, seed 0",
        "softmax beta=0.4, seed 0",
    ]


def test_a_run_that_a_search_gave_up_is_eliminated_not_stopped(tiny_text, tmp_path):
    members = [
        SearchCandidate(
            f"rate-{rate:g}",
            small_config(data__source=str(tiny_text), client__learning_rate=rate),
            {},
        )
        for rate in (0.01, 0.5)
    ]
    race(members, [0], lambda c, seed: tmp_path / c.name, [8, 12], 2, runner=LocalRunner(1))
    states = [row["status"] for row in Watcher(tmp_path).now()["runs"]]
    assert sorted(states) == ["eliminated", "finished"]
