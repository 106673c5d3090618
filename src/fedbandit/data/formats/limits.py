"""How much a source file may ask for: generous for data that people have; more is an accident or an attack."""

from fedbandit.core.errors import DataError

MOST_ACTIONS = 1_000_000
LONGEST_NAME = 1024  # characters of a client's or a label's name
ALWAYS_UNPACKED = 1 << 30  # bytes, however small they were packed
MOST_UNPACKED = 200  # times the packed size; published files unpack to 20 times theirs, a bomb to 1,000 and more


def check_unpacked(where: str, unpacked: int, packed: int, advice: str, at_least: bool = False) -> None:
    """Refuse what is out of all proportion to its packed size, before it fills the disk."""
    if unpacked > max(ALWAYS_UNPACKED, MOST_UNPACKED * packed):
        size = f"{'more than ' if at_least else ''}{unpacked / 1e6:,.1f} MB"
        raise DataError(f"{where} unpacks to {size}, {unpacked // max(packed, 1):,} times its size; {advice}")
