"""The command line: one file a group of commands, and no logic."""

from fedbandit.cli.app import main

__all__ = ["main"]
