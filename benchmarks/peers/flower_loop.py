"""Flower's simulation on Ray: its FedAdam strategy, one virtual node per client, workers of one core each."""

import os
import sys

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

import numpy as np
import torch
from arrays import CLIENT_RATE, SERVER_RATE, Workload
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAdam
from flwr.simulation import run_simulation
from torch_models import log_of, model_for, train

FOLDER, FORM, KIND, WORKERS = *sys.argv[1:4], int(sys.argv[4])
client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def reply(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    work = Workload(FOLDER, FORM)
    model = model_for(work)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    client = work.client(int(context.node_config["partition-id"]))
    log = log_of(client, model if KIND == "bandit" else None, np.random.default_rng())
    train(model, torch.optim.SGD(model.parameters(), CLIENT_RATE), log)
    content = RecordDict(
        {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": 1}),
        }  # an unweighted mean
    )
    return Message(content=content, reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    work = Workload(FOLDER, FORM)
    torch.manual_seed(0)
    strategy = FedAdam(
        fraction_train=1.0,
        fraction_evaluate=0.0,
        min_available_nodes=work.num_clients,
        eta=SERVER_RATE,
    )
    arrays = ArrayRecord(model_for(work).state_dict())
    while requests.wait():
        arrays = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=1).arrays
        requests.done()


if __name__ == "__main__":
    from protocol import Requests

    requests = Requests()
    # A cluster of its own: Ray would wait for one that ended without removing its address from the temporary folder.
    init_args = {"num_cpus": WORKERS, "address": "local"}
    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=Workload(FOLDER, FORM).num_clients,
        backend_config={"client_resources": {"num_cpus": 1}, "init_args": init_args},
    )
