"""A plain torch loop: clients one after the other, autograd, SGD, Adam on the mean of the deltas."""

import sys

import torch
from arrays import BATCH, CLIENT_RATE, SERVER_RATE, Workload
from protocol import serve
from torch_models import chosen_loss, model_for

work = Workload(sys.argv[1])
torch.set_num_threads(int(sys.argv[2]))
torch.manual_seed(0)
model = model_for(work)
params = list(model.parameters())
server_params = [p.detach().clone() for p in params]
server = torch.optim.Adam(server_params, SERVER_RATE)


def run_round() -> None:
    total = [torch.zeros_like(p) for p in server_params]
    for i in range(work.num_clients):
        client = work.client(i)
        x, actions, rewards = map(torch.from_numpy, (client.x, client.actions, client.rewards))
        with torch.no_grad():
            for p, start in zip(params, server_params, strict=True):
                p.copy_(start)
        optimizer = torch.optim.SGD(params, CLIENT_RATE)
        for begin in range(0, len(x), BATCH):
            batch = slice(begin, begin + BATCH)
            optimizer.zero_grad()
            chosen_loss(model(x[batch]), actions[batch], rewards[batch]).backward()
            optimizer.step()
        with torch.no_grad():
            for t, p, start in zip(total, params, server_params, strict=True):
                t.add_(p - start)
    for p, t in zip(server_params, total, strict=True):
        p.grad = -t / work.num_clients
    server.step()


serve(run_round)
