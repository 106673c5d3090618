"""The command line: one file a group of commands, and no logic."""

import sys

from fedbandit.core.errors import MissingExtra, needing

__all__ = ["main"]


def main() -> None:
    """Run the command line; without its packages, one line names the extra."""
    try:
        with needing("the command line"):
            from fedbandit.cli.app import main as run
        run()
    except MissingExtra as missing:
        print(f"error: {missing} (on a device, 'fedbandit[flower]' is enough)", file=sys.stderr)
        sys.exit(missing.exit_code)
    except KeyboardInterrupt:  # before a command has begun, or while it ends
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
