"""The server app that Flower runs: runs the rounds of the TOML file that the run's `deployment`
names.

It can be restarted at any time and resumes after the last saved round.
"""

import logging
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedbandit.core.errors import FedbanditError
from fedbandit.core.logs import rotating
from fedbandit.deploy.flower.transport import GridTransport
from fedbandit.deploy.server.deployment import read_deployment
from fedbandit.deploy.server.rounds import Coordinator
from fedbandit.deploy.server.server_status import Watch, facts_of
from fedbandit.deploy.server.store import Store

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the remaining rounds; whatever ends them early is in `server.log`."""
    deployment = read_deployment(Path(str(context.run_config["deployment"])))
    store = Store(deployment.folder)
    handler = rotating(deployment.folder / "server.log")
    logger = logging.getLogger("fedbandit.deploy")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # Flower would write every line once more, repetitions included
    transport = GridTransport(grid)
    try:
        watch = Watch(deployment.folder, facts_of(deployment))
        Coordinator(deployment, store, transport, watch=watch).run()
    except FedbanditError as problem:
        logger.error("%s", problem)
        raise
    except Exception:
        logger.exception(
            "the server has stopped; start it again to resume after the last saved round"
        )
        raise
    finally:
        transport.close()
        logger.removeHandler(handler)
        handler.close()
        store.close()
