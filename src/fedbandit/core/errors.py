"""Errors that a user can act on. The command line turns them into one line and an exit code."""


class FedbanditError(Exception):
    """Something the user can fix: bad input, a bad configuration, a damaged file. Exit code 2."""

    exit_code = 2


class ConfigError(FedbanditError):
    """A configuration that cannot be run; the message starts with the path of the offending key."""


class DataError(FedbanditError):
    """Data that cannot be read or does not fit; the message names the file, and the client and row where known."""


class Diverged(FedbanditError):
    """Training diverged: a weight or a score is not finite. Exit code 1, since the input may be right."""

    exit_code = 1


class Interrupted(FedbanditError):
    """Work was stopped before its end, as asked by a signal; the same call resumes it."""

    exit_code = 130
