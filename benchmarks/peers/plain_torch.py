"""A plain torch loop: clients one after the other, autograd, SGD, Adam on the mean of the deltas."""

import copy
import sys

import numpy as np
import torch
from arrays import CLIENT_RATE, SERVER_RATE, Workload
from protocol import serve
from torch_models import log_of, model_for, train

work = Workload(sys.argv[1], form=sys.argv[2])
torch.set_num_threads(int(sys.argv[4]))
torch.manual_seed(0)
model = model_for(work)
acting = (
    copy.deepcopy(model) if sys.argv[3] == "bandit" else None
)  # deployed once; nobody here deploys again
rng = np.random.default_rng(0)
params = list(model.parameters())
server_params = [p.detach().clone() for p in params]
server = torch.optim.Adam(server_params, SERVER_RATE)


def run_round() -> None:
    total = [torch.zeros_like(p) for p in server_params]
    for i in range(work.num_clients):
        log = log_of(work.client(i), acting, rng)
        with torch.no_grad():
            for p, start in zip(params, server_params, strict=True):
                p.copy_(start)
        train(model, torch.optim.SGD(params, CLIENT_RATE), log)
        with torch.no_grad():
            for t, p, start in zip(total, params, server_params, strict=True):
                t.add_(p - start)
    for p, t in zip(server_params, total, strict=True):
        p.grad = -t / work.num_clients
    server.step()


serve(run_round)
