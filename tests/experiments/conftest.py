"""A small data set on disk, as a user would import one."""

from pathlib import Path

import numpy as np
import pytest

from fedbandit.data.importers.table import TableOptions, import_table

TAGS = ("red", "green", "blue", "white", "black", "grey")


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory) -> Path:
    """Sixty users with a dozen titles each; a title's words give its tag away more often than not."""
    rng = np.random.default_rng(7)
    folder = tmp_path_factory.mktemp("data")
    lines = ["user,title,tags"]
    for user in range(60):
        for _ in range(12):
            tag = int(rng.choice(len(TAGS), p=[0.3, 0.25, 0.2, 0.1, 0.1, 0.05]))
            words = [f"w{tag}{rng.integers(3)}", f"w{tag}{rng.integers(3)}", f"noise{rng.integers(20)}"]
            lines.append(f"u{user:02d},{' '.join(words)},{TAGS[tag]}")
    table = folder / "table.csv"
    table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = TableOptions(client="user", labels="tags", text=["title"], vocabulary=60, actions=6)
    import_table(table, folder / "tiny", options)
    return folder / "tiny"
