"""The picture of the architecture page, from the import graph and real traces.

    python scripts/architecture.py docs/images/architecture.png

Boxes are packages in the order in which they may import each other; a line shows the packages that a
run, or a device's event, passes through, in the order of first use. These lie beside the picture as
JSON, and a test compares them with the code.
"""

import ast
import io
import itertools
import json
import sys
import tempfile
import textwrap
import threading
import tomllib
from collections.abc import Callable
from contextlib import redirect_stdout
from inspect import CO_OPTIMIZED
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "fedbandit"
BLUE, ORANGE = "#2f5d8a", "#c8641e"


def layers() -> list[list[str]]:
    """The packages in the order of `pyproject.toml`, the highest first; some stand side by side."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    [contract] = [
        one for one in settings["tool"]["importlinter"]["contracts"] if one["type"] == "layers"
    ]
    return [[name.strip() for name in layer.split("|")] for layer in contract["layers"]]


def imports() -> dict[str, set[str]]:
    """For each package, the packages that its files import, at their top or inside a function."""
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        own = package_of(path.relative_to(SOURCE))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                parts = name.split(".")
                if parts[0] == "fedbandit" and len(parts) > 1 and parts[1] != own:
                    found.setdefault(own, set()).add(parts[1])
    return found


def package_of(file: Path) -> str:
    """The package that a file of fedbandit belongs to; a single module is its own."""
    return file.parts[0].removesuffix(".py")


def traced(work: Callable[[], Any]) -> list[Path]:
    """The files of fedbandit with a function that `work` calls, in the order of their first call.

    It is done twice and traced the second time, when all modules are loaded.
    """
    found: dict[str, None] = {}
    work()

    def called(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_flags & CO_OPTIMIZED:  # not the body of a class
            found.setdefault(frame.f_code.co_filename)

    threading.setprofile(called)
    sys.setprofile(called)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    paths = [Path(name) for name in found]
    inside = [path.relative_to(SOURCE) for path in paths if path.is_relative_to(SOURCE)]
    return [path for path in inside if path.name != "__init__.py"]


def run_trace() -> list[Path]:
    """The files that `fedbandit run so-scratch-softmax` calls, with two deployments."""
    from fedbandit.cli.app import program

    words = ["run", "so-scratch-softmax", "--rounds", "3", "--set", "deploy_every=1"]
    words += ["--set", "clients_per_round=8", "--threads", "1", "--quiet", "--out"]
    numbers = itertools.count()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        return traced(
            lambda: program("run")([*words, f"{folder}/{next(numbers)}"], standalone_mode=False)
        )


def device_trace() -> list[Path]:
    """The files that one choice and its reward call on a device."""
    import numpy as np

    from fedbandit.deploy import Agent, DeviceModel

    model = DeviceModel(
        version=1,
        kind="dense",
        shape=(3,),
        actions=("a", "b"),
        policy={"name": "softmax", "beta": 0.1},
        model={"name": "linear"},
        weights={"weight": np.zeros((3, 2), np.float32), "bias": np.zeros(2, np.float32)},
    )
    with tempfile.TemporaryDirectory() as folder, Agent(folder) as agent:
        agent.install(model.to_bytes())

        def event() -> None:
            choice = agent.choose(np.ones(3))
            agent.reward(choice.event_id, 1.0)

        return traced(event)


def passages(files: list[Path]) -> list[str]:
    """The packages of a trace, each where it is first used."""
    return list(dict.fromkeys(package_of(file) for file in files))


def traces() -> dict[str, list[str]]:
    """The passages of a run and of a device's event."""
    return {"a run": passages(run_trace()), "a device's event": passages(device_trace())}


def write(out: Path) -> None:
    """Write the picture, and the traces that it shows as JSON beside it."""
    found = traces()
    out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    draw(found, out)


def draw(found: dict[str, list[str]], out: Path) -> None:
    """Draw packages, their imports, and the traces."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [name for row in layers() for name in row]
    at = {name: len(names) - place for place, name in enumerate(names)}
    figure, axes = plt.subplots(figsize=(10.5, 9.6), dpi=120)
    for name, used in imports().items():
        if name in at:
            text = "imports " + ", ".join(sorted(used & set(at), key=names.index))
            wrapped = textwrap.fill(text, 92)
            axes.text(1.9, at[name], wrapped, fontsize=6, color="#777777", va="center")
    for name, y in at.items():
        axes.text(
            0.9, y, name, ha="center", va="center", fontsize=10,
            bbox={"boxstyle": "round,pad=0.35", "fc": "#f4f4f1", "ec": "#999999"},
        )  # fmt: skip
    for label, side, colour in (("a run", 7.2, BLUE), ("a device's event", 9.0, ORANGE)):
        steps = [name for name in found[label] if name in at]
        ends = [at[name] for name in steps]
        axes.plot([side] * 2, [min(ends), max(ends)], color=colour, lw=1, alpha=0.35, zorder=0)
        for number, name in enumerate(steps, start=1):
            axes.text(
                side, at[name], str(number), color="white", ha="center", va="center", fontsize=8,
                bbox={"boxstyle": "circle,pad=0.25", "fc": colour, "ec": colour},
            )  # fmt: skip
        axes.text(side, len(names) + 1, label, color=colour, ha="center", fontsize=10)
    axes.text(0.9, len(names) + 1, "packages", ha="center", fontsize=10)
    axes.set_xlim(0, 10.2)
    axes.set_ylim(0.3, len(names) + 1.4)
    axes.axis("off")
    figure.savefig(out, bbox_inches="tight")
    plt.close(figure)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
