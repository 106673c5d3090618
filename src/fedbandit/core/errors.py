"""Errors that users see as one line, and the line for a package that a plain installation lacks.

A device needs numpy, safetensors and pydantic. Everything else belongs to an extra of
`pyproject.toml`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line answers without
    from pydantic import ValidationError


class FedbanditError(Exception):
    """Something the user can fix: bad input, a bad configuration, a damaged file. Exit code 2.

    Examples:
        >>> from fedbandit import open_dataset
        >>> try:
        ...     open_dataset("no-such-folder")
        ... except FedbanditError as error:
        ...     print(type(error).__name__)
        DataError
    """

    exit_code = 2

    def __str__(self) -> str:
        """Always one line: names out of somebody's file may hold more."""
        return " ".join(super().__str__().splitlines())


class ConfigError(FedbanditError):
    """A configuration that cannot be run; the message starts with the path of the offending key.

    Examples:
        >>> from fedbandit import Config
        >>> try:
        ...     Config.build({"rounds": 0})
        ... except ConfigError as error:
        ...     print(error)
        rounds: should be greater than or equal to 1, not 0
    """


def refuse(*checks: tuple[object, str], error: type[Exception] = ConfigError) -> None:
    """Raise an error with the message of the first check that holds; without one, do nothing.

    Examples:
        >>> refuse((1 > 2, "rounds: too few"), (3 > 2, "seeds: too many"))
        Traceback (most recent call last):
        fedbandit.core.errors.ConfigError: seeds: too many
    """
    for wrong, message in checks:
        if wrong:
            raise error(message)


class DataError(FedbanditError):
    """Data that cannot be read or does not fit; the message names the file, and the client and row
    where known.

    Examples:
        >>> from fedbandit import Results
        >>> try:
        ...     Results.open("no-such-folder")
        ... except DataError as error:
        ...     print(error)
        no-such-folder: no such folder
    """


@contextmanager
def explaining(where: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds into a `DataError` of one line: `where`, and what was said.

    Of the system's errors the reason counts alone; of others the first line, or the kind of an
    error that says nothing.

    Examples:
        >>> with explaining("visits.csv, line 3", ValueError):
        ...     int("three")
        Traceback (most recent call last):
        fedbandit.core.errors.DataError: visits.csv, line 3: invalid literal for int() with base 10: 'three'
    """
    try:
        yield
    except kinds as error:
        said = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise DataError(f"{where}: {said or type(error).__name__}") from None


class Diverged(FedbanditError):
    """Training diverged: a weight or a score is not finite. Exit code 1, since the input may be
    right.
    """

    exit_code = 1


class PartFailed(FedbanditError):
    """A part of the user's own raised an error in a round; the message names its file and line."""


class Interrupted(FedbanditError):
    """Work was stopped before its end, as asked by a signal; the same call resumes it."""

    exit_code = 130


def first_problem(error: "ValidationError") -> str:
    """The first thing that is wrong with a message or a file, as `path: what` in one line.

    Examples:
        >>> from pydantic import TypeAdapter, ValidationError
        >>> try:
        ...     TypeAdapter(dict[str, int]).validate_python({"events": "many"}, strict=True)
        ... except ValidationError as error:
        ...     print(first_problem(error))
        events: input should be a valid integer, not 'many'
    """
    first = error.errors(include_url=False)[0]
    said = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "missing":
        said = "missing"
    elif first["type"] != "value_error":
        said = f"{said[:1].lower()}{said[1:]}, not {str(first['input'])[:50]!r}"
    path = ".".join(str(part) for part in first["loc"])
    return f"{path}: {said}" if path else said


_EXTRAS = {
    "simulation": (
        "dp_accounting", "google", "ijson", "matplotlib", "numba", "pandas", "pyarrow",
        "rich", "scipy", "tomli_w", "typer",
    ),
    "torch": ("torch",),
    "ray": ("ray",),
    "flower": ("flwr", "cryptography", "prometheus_client", "psutil"),
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow",),
    "wandb": ("wandb",),
}  # fmt: skip


CPU_TORCH = "pip install torch --index-url https://download.pytorch.org/whl/cpu"
"""The command that installs the build of torch for machines without a GPU, which is much smaller."""
EXTRA_OF = {package: extra for extra, packages in _EXTRAS.items() for package in packages}


class MissingExtra(FedbanditError, ImportError):
    """A package that an extra installs is not there; the message names the extra."""


@contextmanager
def needing(what: str) -> Iterator[None]:
    """Import inside this block; if an extra is missing, the error says that `what` needs it and how
    to install it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        extra = EXTRA_OF.get((error.name or "").partition(".")[0])
        if extra is None:  # a package of the user's own, or a mistake of ours
            raise
        command = f"pip install 'fedbandit[{extra}]'"
        if extra == "torch":
            command = f"{command} (without a GPU, first: {CPU_TORCH})"
        raise MissingExtra(f"{what} needs fedbandit[{extra}]: {command}") from None
