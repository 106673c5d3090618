"""What the options of tables have in common, checked at the door."""

from collections.abc import Sequence

from fedbandit.data.holdout import HoldOut
from fedbandit.errors import ConfigError


def check_table_options(
    *,
    text: Sequence[str],
    features: Sequence[str],
    vocabulary: int,
    actions: int | None,
    test_fraction: float,
    **separators: str,
) -> None:
    """Refuse what no table can be read with; a separator is named as its option is."""
    if bool(text) == bool(features):
        raise ConfigError("text, features: give one of them")
    for name, number in (("vocabulary", vocabulary), ("actions", actions)):
        if number is not None and number < 1:
            raise ConfigError(f"{name}: must be at least 1, got {number}")
    for name, separator in separators.items():
        if not separator:
            raise ConfigError(f"{name.replace('_', '-')}: may not be empty")
    HoldOut(test_fraction, by_client=True)
