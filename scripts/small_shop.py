"""The picture of docs/tutorials/small-shop.md: its own code, run for several nights.

Usage: python scripts/small_shop.py [NIGHTS]; writes docs/images/small-shop.png.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "tutorials" / "small-shop.md"
PICTURE = ROOT / "docs" / "images" / "small-shop.png"
RATES = ["--set", "client.learning_rate=0.5", "--set", "server.learning_rate=0.05"]


def main(nights: int) -> None:
    text = PAGE.read_text(encoding="utf-8")
    saved = dict(re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)^```", text, re.S | re.M))
    first = next(
        b for b in re.findall(r"^```python\n(.*?)^```", text, re.S | re.M) if "zeros(" in b
    )
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, code in saved.items():
            Path(name).write_text(code, encoding="utf-8")
        sys.path.insert(0, folder)
        exec(first, {})
        from collect import collect, install
        from visitors import day

        earned = [day(1)]
        for night in range(1, nights):
            out = f"model-{night + 1}.safetensors"
            collect(f"night-{night}")
            words = [f"night-{night}", "-o", out, "--version", str(night + 1), *RATES]
            command = [sys.executable, "-m", "fedbandit", "train-offline", *words]
            subprocess.run([*command, "--objective", "weighted-regression"], check=True)
            install(out)
            earned.append(day(night + 1))
    print([round(value, 3) for value in earned])
    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    error = [1.96 * (value * (1 - value) / 600) ** 0.5 for value in earned]
    axes.errorbar(range(1, nights + 1), earned, error, fmt="o-", capsize=3)
    axes.axhline(0.5625, color="grey", linestyle=":", label="the best, exploring by 10%")
    axes.set(xlabel="day", ylabel="clicks per visit", ylim=(0, 0.7), xticks=range(1, nights + 1))
    axes.legend(loc="lower right")
    figure.savefig(PICTURE, dpi=150)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
