"""Calling the command line as a user does: its exit code, what it prints."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

COMMAND = [sys.executable, "-m", "fedbandit"]


def fedbandit(
    *arguments: object, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `fedbandit ...` to its end."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def in_this_process(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The same without starting a process, which is much quicker; for calls that end early."""
    from fedbandit.cli.app import main

    words, previous = ["fedbandit", *map(str, arguments)], sys.argv
    sys.argv = words
    output, errors = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
        return subprocess.CompletedProcess(words, code, output.getvalue(), errors.getvalue())
    finally:
        sys.argv = previous
    raise AssertionError("main() always exits")


def fails_with_one_line(
    result: subprocess.CompletedProcess[str], *words: str, code: int = 2
) -> None:
    """The call must end with the code, print nothing but one error line, and that line must hold the words."""
    assert result.returncode == code, result.stderr
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0]
