"""The main job in two minutes: four policies in the paper's default scenario on embedded data, shortened."""

from collections.abc import Callable
from pathlib import Path

from fedbandit.config import Config
from fedbandit.presets import preset
from fedbandit.report.report import write_report
from fedbandit.results.plots import draw_curves
from fedbandit.studies.comparison import compare, table

ROUNDS, DEPLOY_EVERY, SEEDS = 300, 40, (0, 1, 2)
POLICIES = ("greedy", "epsilon-greedy", "softmax", "falcon", "baseline")


def demo(out: Path, say: Callable[[str], None] = print) -> Path:
    """Run the demonstration into a folder and draw its picture; run again, it resumes or shows the results."""
    say(f"Federated contextual bandits on the embedded `topics` data, scenario init-shift, {len(SEEDS)} seeds.")
    say(f"Shortened: {ROUNDS} rounds, deploying every {DEPLOY_EVERY} (the paper: 1500, every 200 or 40).\n")
    curves = compare(
        members(),
        SEEDS,
        lambda label, seed: out / "runs" / label / f"seed-{seed}",
        on_end=lambda label, seed, ended: say(f"  {label}, seed {seed}"),
    )
    picture = draw_curves(
        {label: member.running_reward for label, member in curves.items()},
        out / "curves.png",
        title="init-shift on topics (shortened)",
        deploy_every=DEPLOY_EVERY,
        note=f"{ROUNDS} rounds, deploying every {DEPLOY_EVERY}; mean ± std over {len(SEEDS)} seeds",
    )
    say(f"\nFinal running average reward:\n\n{table(curves)}\n")
    say("baseline is the pre-trained model, greedy and never trained again.")
    say(f"Curves: {picture}")
    say(f"Report: {write_report([out / 'runs'], out / 'report.html')}")
    return picture


def members() -> dict[str, Config]:
    """The presets of table 8, shortened."""
    shortened = {"rounds": ROUNDS, "deploy_every": DEPLOY_EVERY, "data.source": "topics"}
    return {name: preset(f"so-init-shift-deploy40-{name}").with_values(shortened) for name in POLICIES}
