#!/usr/bin/env bash
# The reliability tests on other versions of Python, each in an environment of its own.
#
#   scripts/pythons.sh ~/.pyenv/versions/3.12.1/bin/python ~/.pyenv/versions/3.13.0/bin/python
#
# Environments are kept in $ENVIRONMENTS (/tmp/fedbandit-pythons). The last line of each version says how its tests ended.
set -euo pipefail
cd "$(dirname "$0")/.."
environments=${ENVIRONMENTS:-/tmp/fedbandit-pythons}
tests=(
  tests/core tests/config tests/data tests/runs tests/report/test_bad_folders.py tests/federated
  tests/deploy tests/test_fuzz.py tests/test_kills.py tests/test_committed_results.py
)
code=0
for python in "$@"; do
  version=$("$python" -c 'import platform; print(platform.python_version())')
  here=$environments/$version
  [ -d "$here" ] || "$python" -m venv "$here"
  # torch first and exactly: what depends on it then finds it satisfied and asks for no other build.
  "$here/bin/pip" install -q --disable-pip-version-check -c constraints.txt torch
  "$here/bin/pip" install -q --disable-pip-version-check -c constraints.txt ".[dev,flower]"
  "$here/bin/pip" uninstall -q -y fedbandit # the tests are of this checkout
  ended=$(PYTHONPATH=src "$here/bin/python" -m pytest -q -p no:cacheprovider -m "not slow" "${tests[@]}" 2>&1 |
    tee "$here/said.txt" | tail -1) || code=1
  echo "Python $version: $ended"
done
exit $code
