"""What tests share: a cache of their own, and where real data and golden runs lie if somebody has them."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples every time, and no test that fails because the machine is busy.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Embedded data and pre-trained models are made anew for the tests, never taken from the user's cache."""
    previous = os.environ.get("FEDBANDIT_CACHE")
    os.environ["FEDBANDIT_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if previous is None:
        del os.environ["FEDBANDIT_CACHE"]
    else:
        os.environ["FEDBANDIT_CACHE"] = previous


def _test_data(*parts: str) -> Path:
    root = os.environ.get("FEDBANDIT_TEST_DATA")
    if not root:
        pytest.skip("FEDBANDIT_TEST_DATA is not set: the real data and the golden runs are not part of the project")
    path = Path(root).joinpath(*parts)
    if not path.exists():
        pytest.skip(f"{path} does not exist")
    return path


@pytest.fixture
def golden_folder() -> Path:
    return _test_data("golden")


@pytest.fixture
def real_data_folder() -> Path:
    return _test_data("data")
