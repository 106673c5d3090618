"""Mistakes with `figure`, `sweep`, `advise`, `report` and `watch`: one line that says what to mend, and exit code 2."""

import pytest
from command_line import fails_with_one_line, in_this_process


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with sweeps that are wrong in one way each, and a file where a folder is wanted."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "preset.toml").write_text('start = "so-scratch-softmx"\n', encoding="utf-8")
    (tmp_path / "kind.toml").write_text("start = 3\n", encoding="utf-8")
    (tmp_path / "broken.toml").write_text("nonsense\n", encoding="utf-8")
    (tmp_path / "file").write_text("", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["figure"], ["Missing argument", "figure --help"]),
        (["figure", "fig5"], ["fig5", "fig4d", "weights"]),
        (["figure", "fig2a", "--scale", "2"], ["--scale", "at most 1"]),
        (["figure", "fig2a", "--seeds", "0"], ["--seeds"]),
        (["figure", "fig2a", "--budget", "5"], ["--budget", "--tune"]),
        (["figure", "fig2a", "--tune", "--budget", "-1"], ["--budget", "above 0"]),
        (["figure", "fig2a", "--set", "rnds=5"], ["rnds", "rounds"]),
        (["figure", "fig2a", "--workers", "0"], ["--workers"]),
        (["figure", "fig2a", "--engine", "rays"], ["--engine", "'rays'"]),
        (["figure", "fig2a", "--data", "nowhere"], ["nowhere", "topics"]),
        (
            ["figure", "fig2a", "-o", "file", "--scale", "0.01", "--workers", "1", "--seeds", "1"],
            ["file", "irectory"],
        ),
        (["sweep", "missing.toml", "-o", "x"], ["missing.toml", "no such file"]),
        (["sweep", ".", "-o", "x"], ["is not a file"]),
        (["sweep", "preset.toml", "-o", "x"], ["so-scratch-softmx", "so-scratch-softmax"]),
        (["sweep", "kind.toml", "-o", "x"], ["kind.toml: start:", "list", "string"]),
        (["sweep", "broken.toml", "-o", "x"], ["broken.toml", "line 1"]),
        (["sweep", "preset.toml"], ["--out", "sweep --help"]),
        (["advise"], ["--data", "advise --help"]),
        (["advise", "--data", "nowhere"], ["nowhere"]),
        (
            ["advise", "--data", "topics", "--epsilon", "-1"],
            ["--epsilon", "0 to leave privacy out"],
        ),
        (["advise", "--data", "topics", "--scenario", "nope"], ["scenario", "init-shift"]),
        (["report"], ["Missing argument", "report --help"]),
        (["report", "nowhere"], ["nowhere"]),
        (["report", "file"], ["file"]),
        (["watch", "nowhere"], ["nowhere"]),
        (["watch", "--port", "99999"], ["--port", "65535"]),
        (["watch", "--port", "x"], ["--port", "watch --help"]),
    ],
)
def test_one_line_says_what_to_mend(here, words, said):
    fails_with_one_line(in_this_process(*words), *said)
