"""Lets the tests of the example import its files as it does itself."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "tag_suggestions"))
