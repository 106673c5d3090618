"""Two rounds on each of many data set folders, each in a forked process, so that a crash ends one of them only.

As a program: folders as arguments, one JSON object on standard output: folder -> how it ended.
"""

import json
import os
import subprocess
import sys
from pathlib import Path


def outcomes(folders: list[Path]) -> dict[Path, str]:
    """How opening and running each folder ended: `ran REWARD`, `DataError: ...`, another error, or `signal N`."""
    command = [sys.executable, __file__, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    return {Path(folder): outcome for folder, outcome in json.loads(done.stdout).items()}


def _run(folder: str) -> str:
    from fedbandit import Config
    from fedbandit.data import FederatedDataset
    from fedbandit.simulation import simulate

    try:
        dataset = FederatedDataset.open(folder)
        client = {"learning_rate": 0.1}
        config = Config.build(
            {
                "scenario": "scratch",
                "rounds": 2,
                "clients_per_round": 8,
                "deploy_every": 1,
                "client": client,
            }
        )
        return f"ran {[metrics['reward'] for metrics in simulate(config, dataset)]}"
    except BaseException as error:  # this process has nothing else to tell
        return f"{type(error).__name__}: {error}"


def _forked(folder: str) -> str:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, _run(folder).encode()[:60_000])
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as said:
        text = said.read().decode()
    _, status = os.waitpid(child, 0)
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else text


if __name__ == "__main__":
    import fedbandit.simulation  # noqa: F401 - imported once, not by every child

    print(json.dumps({folder: _forked(folder) for folder in sys.argv[1:]}))
