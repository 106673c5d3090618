"""Runs on real data, where somebody has it: exploration pays on questions, the CNN on handwriting fits into 1 GB."""

import subprocess
import sys

import pytest
from command_line import in_this_process

from fedbandit import preset, simulate

pytestmark = pytest.mark.slow

PEAK = """
import sys
from fedbandit.cli.app import main
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(int(status["VmHWM"].split()[0]) / 1024)
"""


def imported(*words, out):
    done = in_this_process("data", "import", *words, "--out", out)
    assert done.returncode == 0, done.stderr
    return out


def test_on_the_questions_softmax_ends_well_above_greedy(real_data_folder, tmp_path):
    table = real_data_folder / "stackoverflow_questions.csv"
    columns = ["--client", "user_id", "--text", "title", "--labels", "tags", "--drop-unlabelled"]
    sizes = ["--vocabulary", "10000", "--actions", "50"]
    questions = imported("table", table, *columns, *sizes, out=tmp_path / "questions")
    final = {}
    for policy in ("softmax", "greedy"):
        config = preset(f"so-scratch-{policy}").with_values({"data.source": str(questions)})
        assert config.rounds == 1600
        final[policy] = simulate(config).collect()["running_reward"][-1]
    assert final["softmax"] > final["greedy"] + 0.05


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from /proc")
def test_rounds_of_the_cnn_on_handwriting_fit_into_a_gigabyte(real_data_folder, tmp_path):
    arrays = real_data_folder / "handwriting62.npz"
    names = ["--features", "images", "--labels", "labels", "--clients", "writers", "--invert"]
    handwriting = imported("arrays", arrays, *names, out=tmp_path / "handwriting")
    words = [
        "run",
        "emnist-scratch-softmax",
        "--data",
        handwriting,
        "--rounds",
        "2",
        "--out",
        tmp_path / "run",
    ]
    words += ["--set", "deploy_every=1", "--set", "evaluate_every=2", "--set", "threads=2"]
    command = [sys.executable, "-c", PEAK, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.splitlines()[-1]) < 1000
