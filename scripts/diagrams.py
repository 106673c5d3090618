"""Diagrams of documentation pages: a round with the places of one's own parts, and a deployment.

    python scripts/diagrams.py docs/images

A diagram is a list of boxes and arrows below; nothing is measured here.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

BLUE, ORANGE, GREY = "#2f5d8a", "#c8641e", "#8a8a8a"


@dataclass(frozen=True)
class Box:
    """A box with a title, a line below it, and a colour."""

    x: float
    y: float
    title: str
    text: str
    colour: str = BLUE


Arrow = tuple[str, str, str]  # from, to, what is written on it

ROUND: tuple[list[Box], list[Arrow]] = (
    [
        Box(0, 2, "context", "what the device knows", GREY),
        Box(1, 2, "model", "scores every action"),
        Box(2, 2, "policy", "probabilities of actions"),
        Box(3, 2, "environment", "pays for the choice"),
        Box(3, 1, "log", "context, action, reward, ρ", GREY),
        Box(2, 1, "objective", "the loss of a log"),
        Box(1, 1, "algorithm", "what is sent, how it steps"),
    ],
    [
        ("context", "model", ""),
        ("model", "policy", ""),
        ("policy", "environment", ""),
        ("environment", "log", ""),
        ("log", "objective", ""),
        ("objective", "algorithm", ""),
        ("algorithm", "model", "a new version now and then"),
    ],
)

DEPLOYMENT: tuple[list[Box], list[Arrow]] = (
    [
        Box(0, 2, "your app", "asks, then tells the reward", GREY),
        Box(1, 2, "agent", "chooses in numpy, logs ρ"),
        Box(1, 1, "log", "stays on the device", GREY),
        Box(2, 1, "device trains", "clips, masks, adds noise"),
        Box(3, 1, "server", "sums, noise, step, gate", ORANGE),
        Box(3, 2, "new version", "weights and rule", ORANGE),
    ],
    [
        ("your app", "agent", "context"),
        ("agent", "log", ""),
        ("log", "device trains", ""),
        ("device trains", "server", "update"),
        ("server", "new version", ""),
        ("new version", "agent", "model file"),
    ],
)


def draw(boxes: list[Box], arrows: list[Arrow], to: Path) -> None:
    """Write one diagram."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(9.6, 2.9), layout="constrained")
    half, tall = 0.36, 0.29
    places = {box.title: (box.x, box.y) for box in boxes}
    for box in boxes:
        corner = (box.x - half, box.y - tall)
        axis.add_patch(
            plt.Rectangle(corner, 2 * half, 2 * tall, ec=box.colour, fc=f"{box.colour}18", lw=1.6)
        )
        axis.text(box.x, box.y + 0.08, box.title, ha="center", va="center", weight="bold")
        axis.text(box.x, box.y - 0.13, box.text, ha="center", va="center", fontsize=7.5)
    for start, end, text in arrows:
        (x0, y0), (x1, y1) = places[start], places[end]
        flat = y0 == y1
        side = half * (1 if x1 > x0 else -1) if flat else 0
        rise = 0 if flat else tall * (1 if y1 > y0 else -1)
        axis.annotate(
            "",
            (x1 - side, y1 - rise),
            (x0 + side, y0 + rise),
            arrowprops={"arrowstyle": "-|>", "color": "#444444", "lw": 1.2},
        )
        middle = ((x0 + x1) / 2 - 0.03 * (not flat), (y0 + y1) / 2 + 0.09 * flat)
        beside = "center" if flat else "right"
        axis.text(*middle, text, ha=beside, fontsize=8, color="#444444")
    axis.set_xlim(-0.5, 3.5)
    axis.set_ylim(0.6, 2.4)
    axis.axis("off")
    figure.savefig(to, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    draw(*ROUND, folder / "parts.png")
    draw(*DEPLOYMENT, folder / "deployment.png")
