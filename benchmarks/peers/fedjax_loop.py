"""FedJAX: its own federated averaging, compiled; inputs are its client data sets, batched and padded by itself."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from arrays import BATCH, CLIENT_RATE, SERVER_RATE, Workload
from protocol import serve

jax.tree_map = jax.tree_util.tree_map  # FedJAX uses the name that newer versions of JAX dropped
import fedjax  # noqa: E402
from fedjax.algorithms import fed_avg  # noqa: E402

work = Workload(sys.argv[1], form=sys.argv[2])
BANDIT = sys.argv[3] == "bandit"


def glorot(rng: np.random.Generator, *shape: int) -> jnp.ndarray:
    fan = np.prod(shape[:-2]) * (shape[-2] + shape[-1])
    return jnp.asarray(rng.normal(0, np.sqrt(2 / fan), shape), jnp.float32)


def init() -> dict[str, jnp.ndarray]:
    rng = np.random.default_rng(0)
    if not work.is_images:
        return {"w": glorot(rng, work.words, work.num_actions), "b": jnp.zeros(work.num_actions)}
    shapes = {
        "c1": (5, 5, 1, 32),
        "c2": (5, 5, 32, 64),
        "d1": (3136, 512),
        "d2": (512, work.num_actions),
    }
    weights = {name: glorot(rng, *shape) for name, shape in shapes.items()}
    return weights | {f"{name}_bias": jnp.zeros(shape[-1]) for name, shape in shapes.items()}


def scores(p: dict[str, jnp.ndarray], x: jnp.ndarray) -> jnp.ndarray:
    if work.sparse and not work.is_images:
        return work.value * p["w"][x].sum(axis=1) + p["b"]
    if not work.is_images:
        return x @ p["w"] + p["b"]
    x = x[..., None]
    for layer in ("c1", "c2"):
        x = jax.lax.conv_general_dilated(
            x, p[layer], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x + p[f"{layer}_bias"])
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = jax.nn.relu(x.reshape(len(x), -1) @ p["d1"] + p["d1_bias"])
    return x @ p["d2"] + p["d2_bias"]


def loss(p: dict[str, jnp.ndarray], batch: dict[str, jnp.ndarray]) -> jnp.ndarray:
    actions = batch["actions"]
    if (
        work.sparse and not work.is_images
    ):  # of each word's row the loss needs the chosen action's entry alone
        chosen = work.value * p["w"][batch["x"], actions[:, None]].sum(axis=1) + p["b"][actions]
    else:
        chosen = jnp.take_along_axis(scores(p, batch["x"]), actions[:, None], axis=1)[:, 0]
    return jnp.mean((chosen - batch["rewards"]) ** 2)


algorithm = fed_avg.federated_averaging(
    lambda p, batch, rng: jax.grad(loss)(p, batch),
    fedjax.optimizers.sgd(CLIENT_RATE),
    fedjax.optimizers.adam(SERVER_RATE),
    fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH, num_epochs=1, seed=0),
)
rng = np.random.default_rng(0)
score = jax.jit(scores)


def client_data(i: int) -> tuple[int, fedjax.ClientDataset, jnp.ndarray]:
    """The log that a client has, or the one that it makes by acting."""
    one = work.client(i)
    if BANDIT:
        one = one.acted(np.asarray(score(deployed, one.x)), rng)
    columns = {"x": one.x, "actions": one.actions.astype(np.int32), "rewards": one.rewards}
    return i, fedjax.ClientDataset(columns), jax.random.PRNGKey(i)


deployed = init()
state = algorithm.init(deployed)
logged = [client_data(i) for i in range(work.num_clients)]


def run_round() -> None:
    global state
    clients = [client_data(i) for i in range(work.num_clients)] if BANDIT else logged
    state, _ = algorithm.apply(state, clients)
    jax.block_until_ready(state.params)


serve(run_round)
