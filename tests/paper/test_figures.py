"""Every figure of the paper: its runs, its verdicts, and making one end to end."""

import json
from dataclasses import replace
from html import escape

import numpy as np
import pytest
from scripts.paper_pages import fill, panels, scoreboard, tuned_table

from fedbandit.cli.app import main
from fedbandit.core.errors import ConfigError, DataError
from fedbandit.data import open_dataset
from fedbandit.paper.catalogue import OURS, MemberResult, figure, figure_names, matching
from fedbandit.paper.figures import FigureRequest, make_figure, make_figures, regime
from fedbandit.paper.records import (
    comparison_table,
    comparisons,
    effort_in_words,
    read_figures,
    text_of,
)
from fedbandit.presets import preset
from fedbandit.results.plots import write_heading
from fedbandit.runs.local_runner import LocalRunner
from fedbandit.studies.search import TUNING_SEED, scaled

REDUCED = {"clients_per_round": 8, "pretraining.clients": 20, "pretraining.rounds": 1}


@pytest.mark.parametrize("name", [*figure_names(), *OURS])
def test_every_figure_has_buildable_members(name):
    for family in ("emnist", "so") if name.startswith("ablation") else (None,):
        wanted = figure(name, family)
        configs = {label: member.config() for label, member in wanted.members.items()}
        assert len({member.key for member in wanted.members.values()}) == len(configs)
        assert all(label in configs for label in wanted.stated)
        assert wanted.sentences
        for sentence in wanted.sentences:
            assert {*sentence.members} <= {*configs, *wanted.beside}
        for other, label in wanted.beside.values():
            assert label in figure(other).members


def test_names_stand_for_one_several_or_all():
    assert matching("fig1c") == ["fig1c"]
    assert matching("fig2") == ["fig2a", "fig2b", "fig2c", "fig2d"]
    assert len(matching("all")) == 21
    assert matching("cohorts") == ["cohorts"]
    with pytest.raises(ConfigError, match="fig2a"):
        matching("fig2e")


def test_scale_shortens_rounds_and_deployments_together_and_never_pretraining():
    config = scaled(preset("so-init-shift-softmax"), 0.1)
    assert (config.rounds, config.deploy_every, config.pretraining.rounds) == (150, 20, 100)
    assert scaled(config, 0.0001).deploy_every == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"scale": 0},
        {"scale": 1.5},
        {"seeds": 0},
        {"settings": {"seed": 3}},
        {"settings": {"data.source": "topics"}},
    ],
)
def test_impossible_requests_are_refused(wrong):
    with pytest.raises(ConfigError):
        FigureRequest(**wrong)


def test_the_regime_is_computed_from_data_and_configuration(tiny_text):
    dataset = open_dataset(str(tiny_text))
    config = preset("so-init-shift-softmax").with_values(
        {**REDUCED, "data.source": str(tiny_text), "rounds": 10}
    )
    told = regime(dataset, config)
    sizes = np.minimum(dataset.train.sizes(), 256)
    pool = len(sizes) - 20
    assert told.visits_per_client == pytest.approx(80 / pool)
    assert told.examples_per_visit == pytest.approx(sizes[20:].mean())
    assert told.passes == pytest.approx(80 / pool)
    assert told.pretraining_examples == round(20 * sizes[:20].mean())
    assert regime(dataset, config.with_values({"scenario": "scratch"})).pretraining_examples == 0


def test_differences_are_paired_by_the_seeds_that_both_have():
    a, b = MemberResult({0: 1.0, 7: 5.0}), MemberResult({0: 0.5, 3: 2.0, 7: 4.0})
    assert a.minus(b).tolist() == [0.5, 1.0]


def test_a_figure_is_made_once_and_shares_its_runs(tiny_text, tmp_path):
    request = FigureRequest(
        str(tiny_text), seeds=2, scale=0.004, settings=REDUCED, runner=LocalRunner(1)
    )
    said = []
    made = make_figure("fig2c", request, tmp_path, said.append)
    assert made.png.read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in made.png.with_suffix(".svg").read_bytes()[:2000]
    for part in (
        "softmax",
        "0.81 there",
        "softmax above greedy",
        "published rates",
        "shortened to 0.004",
    ):
        assert part in text_of(made)
    numbers = json.loads((tmp_path / "fig2c.json").read_text(encoding="utf-8"))
    assert len(numbers["members"]["softmax"]["final"]) == 2
    assert sum("finished" in line for line in said) == 10

    said.clear()
    make_figure("fig2c", request, tmp_path, said.append)
    make_figure("fig3b", request, tmp_path, said.append)  # the same softmax runs
    assert not [line for line in said if "finished" in line]


def test_more_deployments_are_set_beside_fewer_where_those_were_played(tiny_text, tmp_path):
    request = FigureRequest(
        str(tiny_text), seeds=2, scale=0.004, settings=REDUCED, runner=LocalRunner(1)
    )
    alone = make_figure("fig2d", request, tmp_path, lambda text: None)
    assert "make that too" in text_of(alone)
    make_figure("fig2c", request, tmp_path, lambda text: None)
    text = text_of(make_figure("fig2d", request, tmp_path, lambda text: None))
    for policy in ("softmax", "falcon", "epsilon-greedy", "greedy"):
        assert f"{policy} above {policy} every 200 rounds" in text
    assert "make that too" not in text
    [kept] = [one for one in read_figures([tmp_path]) if one.name == "fig2d"]
    often, seldom = (
        json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))["members"]["greedy"][
            "mean"
        ]
        for name in ("fig2d", "fig2c")
    )
    [greedy] = [one for one in kept.verdicts if one.claim.startswith("greedy above greedy")]
    assert greedy.difference == pytest.approx(often - seldom)


def test_a_figure_with_another_model_says_so_and_keeps_its_own_place(tiny_text, tmp_path):
    kept = []
    for model in ("linear", "linear-heads"):
        settings = {**REDUCED, "model.name": model}
        request = FigureRequest(
            str(tiny_text), seeds=1, scale=0.004, settings=settings, runner=LocalRunner(1)
        )
        made = make_figure("fig3b", request, tmp_path / model, lambda text: None)
        assert text_of(made).startswith(
            f"fig3b: Stack Overflow, init-shift: softmax, trial by trial, {model} model\n"
        )
        kept += read_figures([made.path])
    markdown = panels(kept, tmp_path, "Figure 3")
    name = open_dataset(str(tiny_text)).header.name
    assert all(
        markdown.count(f"{{ #fig3b-{name}-{model} }}") == 1 for model in ("linear", "linear-heads")
    )


@pytest.mark.slow
def test_a_private_figure_prints_epsilon_beside_the_papers(tiny_text, tmp_path):
    settings = {"clients_per_round": 8}
    request = FigureRequest(
        str(tiny_text), seeds=1, scale=0.004, settings=settings, runner=LocalRunner(1)
    )
    text = text_of(make_figure("fig4c", request, tmp_path, lambda text: None))
    [run] = tmp_path.rglob("so-dp-0.7/seed-0/summary.json")
    ours = json.loads(run.read_text(encoding="utf-8"))["privacy"]["epsilon_rdp"]
    assert f"NM=0.7: {ours:.4g}; the paper states 1.5" in text
    assert "No DP: none" in text


def test_a_figure_of_ours_compares_caches_with_the_papers_simplification(tiny_text, tmp_path):
    request = FigureRequest(
        str(tiny_text), seeds=2, scale=0.004, settings=REDUCED, runner=LocalRunner(1)
    )
    text = text_of(make_figure("population", request, tmp_path, lambda text: None))
    assert "caches, one in four pulls, every 40 about as simple mode, every 40" in text
    caches = list(tmp_path.rglob("so-init-shift-softmax+caches/seed-0/config.toml"))
    assert 'mode = "population"' in caches[0].read_text(encoding="utf-8")


@pytest.mark.slow
def test_tuning_uses_other_seeds_and_keeps_its_choice(tiny_text, tmp_path):
    request = FigureRequest(
        str(tiny_text),
        seeds=1,
        scale=0.004,
        settings=REDUCED,
        tune_minutes=0.2,
        runner=LocalRunner(1),
    )
    said = []
    made = make_figure("fig3b", request, tmp_path, said.append)
    assert made.png.name == "fig3b-tuned.png"
    [choice] = tmp_path.rglob("choice.json")
    kept = json.loads(choice.read_text(encoding="utf-8"))
    assert kept["seed"] == TUNING_SEED
    assert set(kept["point"]) == {"client.learning_rate", "server.learning_rate", "policy.beta"}
    assert kept["looked_at"] >= 1
    assert f"softmax {kept['looked_at']} of 192" in text_of(made)
    server, client, beta = (
        kept["point"][key]
        for key in ("server.learning_rate", "client.learning_rate", "policy.beta")
    )
    chosen = f"server {server:g}, client {client:g}, beta {beta:g}"
    said.clear()
    make_figure("fig3b", request, tmp_path, said.append)
    assert not [line for line in said if line.startswith("tuning")]
    assert "softmax" not in tuned_table(read_figures([tmp_path]))  # nothing to set it beside yet
    make_figure("fig3b", replace(request, tune_minutes=None), tmp_path, said.append)
    before, after = (
        json.loads((tmp_path / name).read_text(encoding="utf-8"))["members"]["softmax"]["mean"]
        for name in ("fig3b.json", "fig3b-tuned.json")
    )
    name = open_dataset(str(tiny_text)).header.name
    tried = f"{kept['looked_at']} of 192"
    row = f"| 3b, {name} | softmax | {before:.3f} | {after:.3f} | {chosen} | {tried} |"
    assert tuned_table(read_figures([tmp_path])).splitlines()[2:] == [row]


def _efforts(**counts):
    return {
        label: {"looked_at": seen, "grid_points": total} for label, (seen, total) in counts.items()
    }


def test_uneven_tuning_is_warned_of():
    even = _efforts(a=(128, 192), b=(70, 192), greedy=(51, 64))
    assert "not fair to them" not in effort_in_words(even)
    assert "warning: b had" in effort_in_words(_efforts(a=(60, 192), b=(3, 128)))
    assert "falcon 72 of 384 (19%)" in effort_in_words(_efforts(falcon=(72, 384)))


def test_a_figure_on_images_refuses_text(tiny_text, tmp_path):
    with pytest.raises(ConfigError, match="images"):
        make_figure("fig1a", FigureRequest(str(tiny_text)), tmp_path)


def test_a_gallery_is_a_page_with_every_picture(tiny_text, tmp_path, monkeypatch, capsys):
    request = FigureRequest(
        str(tiny_text), seeds=2, scale=0.003, settings=REDUCED, runner=LocalRunner(1)
    )
    names, tiny_name = (
        ["fig2c", "ablation-importance-weighting"],
        open_dataset(str(tiny_text)).header.name,
    )
    made, index = make_figures(names, request, tmp_path, lambda text: None)
    text = index.read_text(encoding="utf-8")
    assert text.count("<img") == text.count("<details>") == 2
    for one in made:
        numbers = json.loads(one.path.read_text(encoding="utf-8"))
        assert f'src="{one.png.name}"' in text
        assert escape(numbers["note"]) in text
        for verdict in read_figures([one.path])[0].verdicts:
            assert escape(verdict.claim) in text
    assert "Which rule won" in text
    assert "http" not in text.replace("http-equiv", "")
    (tmp_path / "pages").mkdir()
    parts = ("scoreboard", "tally", "cards", "panels Figure 2", "table")
    marks = "".join(f"<!-- begin {part} -->old\n<!-- end {part} -->\n" for part in parts)
    markdown = tmp_path / "pages" / "page.md"
    markdown.write_text(f"Before.\n{marks}After.\n")
    to = ["-o", str(tmp_path / "pages" / "all.html")]
    monkeypatch.setattr("sys.argv", ["fedbandit", "gallery", str(tmp_path), *to])
    with pytest.raises(SystemExit):
        main()
    for _ in range(2):  # filling a page again changes nothing
        fill(markdown, read_figures([tmp_path]), tmp_path / "pages")
    filled = markdown.read_text(encoding="utf-8")
    assert filled.startswith("Before.")
    assert filled.endswith("After.\n")
    assert "old" not in filled
    assert filled.count("](../fig2c.png)") == 2
    assert f"(paper/figure-2.md#fig2c-{tiny_name})" in filled
    assert filled.count("\n### Figure 2\n") == filled.count("\n### Ablations\n") == 1
    assert "| the paper says | agrees | disagrees | not clear |" in filled
    assert filled.count("| setting | data |") == 1
    assert 'src="../fig2c.png"' in (tmp_path / "pages" / "all.html").read_text(encoding="utf-8")
    assert "| softmax | falcon | epsilon-greedy | greedy |" in capsys.readouterr().out


def _kept(tmp_path, scale=1.0, **final):
    members = {
        rule: {"final": final.get(rule.replace("-", "_"), []), "seeds": [0, 1, 2], "diverged": []}
        for rule in ("softmax", "falcon", "epsilon-greedy", "greedy")
    }
    for member in members.values():
        member["seeds"] = member["seeds"][: len(member["final"])]
    numbers = {
        "figure": "fig2a",
        "title": "t",
        "note": "n",
        "data": "d",
        "setting": "SO, scratch",
        "members": members,
    }
    numbers["scale"] = scale
    (tmp_path / "fig2a.json").write_text(json.dumps(numbers))
    (tmp_path / "fig2a.png").write_bytes(b"")
    return read_figures([tmp_path])


def test_the_scoreboard_lists_where_a_claim_was_found_true_and_where_not(tmp_path):
    figures = _kept(
        tmp_path,
        softmax=[0.50, 0.51, 0.52],
        falcon=[0.50, 0.51, 0.50],
        epsilon_greedy=[0.1, 0.1, 0.11],
        greedy=[0.3, 0.31, 0.3],
    )
    where = "[2a, d](paper/figure-2.md#fig2a-d)"
    lines = scoreboard(figures, tmp_path, tmp_path).splitlines()
    helps = "exploration almost always helps relative to the baseline greedy strategy"
    assert f"| {helps} | {where} (2 of 3) | {where} (1 of 3) |  |" in lines
    assert "agrees" in text_of(figures[0])


def test_the_winner_is_named_with_its_margin_or_a_tie(tmp_path):
    [won] = comparisons(
        _kept(tmp_path, softmax=[0.5, 0.6, 0.5], falcon=[0.3, 0.4, 0.31], greedy=[0.1, 0.1, 0.1])
    )
    assert (won.winner, won.second, won.level) == ("softmax", "falcon", ())
    assert won.margin == pytest.approx((0.2 + 0.2 + 0.19) / 3)
    assert (won.cell("softmax"), won.cell("falcon"), won.cell("epsilon-greedy")) == (
        "**0.533**",
        "0.337",
        "–",
    )
    assert won.data == "d, 3 seeds"
    [tied] = comparisons(
        _kept(tmp_path, 0.25, softmax=[0.5, 0.6, 0.5], epsilon_greedy=[0.6, 0.5, 0.49])
    )
    assert tied.data == "d, 3 seeds, shortened to 0.25"
    assert tied.lead().startswith("a tie: ")
    assert tied.cell("epsilon-greedy").startswith("**")
    three = {
        "softmax": [0.5, 0.6, 0.5],
        "epsilon_greedy": [0.6, 0.5, 0.49],
        "falcon": [0.59, 0.4, 0.59],
    }
    [tied] = comparisons(_kept(tmp_path, **three, greedy=[0.1, 0.1, 0.1]))
    assert [
        rule
        for rule in ("softmax", "falcon", "epsilon-greedy", "greedy")
        if tied.cell(rule)[0] == "*"
    ] == [
        "softmax",
        "falcon",
        "epsilon-greedy",
    ]
    assert comparison_table([won, tied]).count("\n") == 3
    [alone] = comparisons(_kept(tmp_path, softmax=[0.5], falcon=[0.4]))
    assert (alone.lead(), alone.data) == ("one seed: softmax by 0.100 over falcon", "d, 1 seed")
    assert alone.cell("falcon") == "0.400"
    with pytest.raises(DataError, match="no figure here"):
        read_figures([tmp_path / "empty"])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["emnist", "so"])
def test_no_title_is_cut_off(family):
    """At their real lengths, with the longest notes there are."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    wanted = [
        figure(name, family if name.startswith("ablation") else None) for name in figure_names()
    ]
    titles = [f"{one.name}: {one.title}" for one in wanted]
    note = "data: stackoverflow; 1500 rounds, deploying every 200; shortened to 0.25; changed: clients_per_round=16,"
    note += " client.max_examples=64; 3 seeds; tuned here"
    for title in titles:
        picture = Figure(figsize=(7.2, 4.5), layout="constrained")
        canvas = FigureCanvasAgg(picture)
        axes = picture.add_subplot()
        axes.set(xlabel="round", ylabel="running average reward")
        write_heading(axes, title, note)
        canvas.draw()
        for text in (axes._left_title, *axes.texts):
            shown = text.get_window_extent(canvas.get_renderer())
            assert shown.x1 <= picture.bbox.x1, title
            assert shown.y1 <= picture.bbox.y1, title
