"""What can go wrong in ways a user can act on. The command line turns these into one line and an exit code."""


class FedbanditError(Exception):
    """Something the user can mend: bad input, a bad configuration, a damaged file. Exit code 2."""

    exit_code = 2


class ConfigError(FedbanditError):
    """A configuration that cannot be run; the message starts with the path of the offending key."""


class DataError(FedbanditError):
    """Data that cannot be read or does not fit; the message names the file, and the client and row where known."""


class Diverged(FedbanditError):
    """Training left the finite numbers. Not a user's mistake as such, so it has an exit code of its own."""

    exit_code = 1


class Interrupted(FedbanditError):
    """Work was stopped before its end, as asked by a signal; the same call resumes it."""

    exit_code = 130
