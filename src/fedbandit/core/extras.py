"""What a plain installation lacks: a missing package becomes one line that names the extra with which it is installed.

A device needs numpy, safetensors and pydantic. Everything else belongs to an extra of `pyproject.toml`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from fedbandit.core.errors import FedbanditError

_EXTRAS = {
    "simulation": (
        "dp_accounting", "ijson", "matplotlib", "numba", "pandas", "pyarrow",
        "rich", "scipy", "tomli_w", "torch", "typer",
    ),
    "ray": ("ray",),
    "flower": ("flwr",),
    "tensorboard": ("tensorboard",),
}  # fmt: skip
EXTRA_OF = {package: extra for extra, packages in _EXTRAS.items() for package in packages}


class MissingExtra(FedbanditError, ImportError):
    """A package that an extra installs is not there; the message names the extra."""


@contextmanager
def needing(what: str) -> Iterator[None]:
    """Import inside this block; if an extra is missing, the error says that `what` needs it and how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        extra = EXTRA_OF.get((error.name or "").partition(".")[0])
        if extra is None:  # a package of the user's own, or a mistake of ours
            raise
        raise MissingExtra(f"{what} needs fedbandit[{extra}]: pip install 'fedbandit[{extra}]'") from None
