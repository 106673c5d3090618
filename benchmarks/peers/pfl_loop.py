"""pfl: FederatedAveraging on its SimulatedBackend with its own model wrapper; one process, one or two torch threads."""

import copy
import sys

import numpy as np
import torch
from arrays import BATCH, CLIENT_RATE, SERVER_RATE, Workload
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from protocol import Requests
from torch_models import chosen_loss, log_of, model_for

work = Workload(sys.argv[1], form=sys.argv[2])
torch.set_num_threads(int(sys.argv[4]))
torch.manual_seed(0)
np.random.seed(0)  # noqa: NPY002 - pfl draws from the global generator


class WithLoss(torch.nn.Module):
    """The module as pfl wants it: with a loss and metrics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model_for(work)

    def loss(self, x, actions, rewards, eval=False):
        self.train(not eval)
        return chosen_loss(self.inner, x, actions, rewards)

    @torch.no_grad()
    def metrics(self, x, actions, rewards):
        return {"loss": Weighted(float(self.loss(x, actions, rewards, eval=True)), 1)}


class Turns(TrainingProcessCallback):
    """Waits between central iterations until the next one is asked for."""

    def __init__(self) -> None:
        self._requests = Requests()

    def on_train_begin(self, *, model):
        self._requests.wait()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self._requests.done()
        return not self._requests.wait(), Metrics()


def user_dataset(user: int) -> Dataset:
    return Dataset(raw_data=log_of(work.client(user), acting, rng))


users = list(range(work.num_clients))
data = FederatedDataset(user_dataset, get_user_sampler("minimize_reuse", users))
module = WithLoss()
acting = copy.deepcopy(module.inner) if sys.argv[3] == "bandit" else None
rng = np.random.default_rng(0)
model = PyTorchModel(module, torch.optim.SGD, torch.optim.Adam(module.parameters(), SERVER_RATE))
FederatedAveraging().run(
    NNAlgorithmParams(
        central_num_iterations=10**6,
        evaluation_frequency=10**6,
        train_cohort_size=work.num_clients,
        val_cohort_size=0,
    ),
    SimulatedBackend(training_data=data, val_data=data),
    model,
    NNTrainHyperParams(local_num_epochs=1, local_learning_rate=CLIENT_RATE, local_batch_size=BATCH),
    NNEvalHyperParams(local_batch_size=None),
    callbacks=[Turns()],
    send_metrics_to_platform=False,
)
