"""What a round costs on a cluster: bytes that travel and seconds of work, predicted from one measured round.

`python -m benchmarks.cluster_cost --help`. Arithmetic only; docs/distributed.md explains the terms.
"""

import argparse
import time
import timeit
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class WorkMeasurement:
    """What a round of a small cohort was like on one core."""

    weight_bytes: int  # of one model
    seconds_per_client: float
    clients_per_chunk: float
    sum_bytes: float  # of a chunk's sum, on average


@dataclass(frozen=True)
class Cost:
    """One round; the two times overlap, so the round takes about the longer one."""

    chunks: int
    bytes_out: float
    bytes_back: float
    work_seconds: float
    wire_seconds: float

    @property
    def seconds(self) -> float:
        return max(self.work_seconds, self.wire_seconds)


def predict(
    measured: WorkMeasurement,
    *,
    clients: int,
    machines: int,
    cores: int,
    deploy_every: int,
    gigabits: float,
) -> Cost:
    """A round of `clients` clients on `machines` machines of `cores` cores, the driver linked by `gigabits` per second.

    Weights go to each machine once, whatever its cores; every chunk sends one sum to the driver.
    """
    chunks = -int(-clients // measured.clients_per_chunk)
    bytes_out = machines * measured.weight_bytes * (1 + 1 / deploy_every)
    bytes_back = chunks * measured.sum_bytes
    busy = min(machines * cores, chunks)  # more workers than chunks stay idle
    return Cost(
        chunks=chunks,
        bytes_out=bytes_out,
        bytes_back=bytes_back,
        work_seconds=clients * measured.seconds_per_client / busy,
        wire_seconds=8 * (bytes_out + bytes_back) / (gigabits * 1e9),
    )


def measure(source: str, model: str, clients: int, seed: int = 0) -> WorkMeasurement:
    """Play a cohort on one core, chunk by chunk, after one round to warm up."""
    from fedbandit.assembly.experiment import build_experiment
    from fedbandit.config import Config
    from fedbandit.data import open_dataset

    values = {
        "scenario": "scratch",
        "clients_per_round": clients,
        "seed": seed,
        "model": {"name": model},
    }
    experiment = build_experiment(
        Config.build({**values, "data": {"source": source}}), open_dataset(source)
    )
    phase, weights = experiment.bandit, experiment.initial_weights()
    sizes: list[int] = []
    seconds = 0.0
    for number in (1, 2):
        broadcast = phase.work.broadcast(replace(phase.start(weights), round=number - 1))
        chunks = phase.work.chunks(phase.cohorts.draw(number))
        start = time.perf_counter()
        results = [phase.work(chunk, broadcast) for chunk in chunks]
        seconds = time.perf_counter() - start
        sizes = [
            sum(array.nbytes for array in vars(result.sent.sums["weights"]).values())
            for result in results
        ]
    return WorkMeasurement(
        weights.nbytes, seconds / clients, clients / len(sizes), sum(sizes) / len(sizes)
    )


def sampling_seconds(population: int, clients: int) -> dict[str, float]:
    """Seconds that it takes to draw a cohort of `clients`, by kind of sampling; the best of three."""
    from fedbandit.federated.cohorts import FixedCohorts, PoissonCohorts

    kinds = {
        "fixed": FixedCohorts(range(population), clients, 0),
        "poisson": PoissonCohorts(range(population), clients / population, 0),
    }
    return {
        kind: min(timeit.repeat(lambda drawn=cohorts: drawn.draw(1), number=1, repeat=3))
        for kind, cohorts in kinds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster_cost", description=__doc__)
    parser.add_argument("--source", default="topics", help="data set to measure with")
    parser.add_argument("--model", default="linear")
    parser.add_argument(
        "--measure-clients", type=int, default=64, help="size of the cohort that is measured"
    )
    parser.add_argument(
        "--clients",
        type=int,
        nargs="+",
        default=[64, 1000, 10_000, 100_000],
        help="clients per round",
    )
    parser.add_argument("--machines", type=int, default=100)
    parser.add_argument("--cores", type=int, default=16)
    parser.add_argument("--deploy-every", type=int, default=200)
    parser.add_argument(
        "--gigabits", type=float, default=10.0, help="of the driver's link, per second"
    )
    parser.add_argument(
        "--population", type=int, help="time the sampling of 10,000 clients out of so many instead"
    )
    chosen = parser.parse_args()
    if chosen.population is not None:
        for kind, seconds in sampling_seconds(chosen.population, 10_000).items():
            print(f"{kind:<8} {1e3 * seconds:8.3g} ms")
        return
    found = measure(chosen.source, chosen.model, chosen.measure_clients)
    print(
        f"measured on one core: {1e3 * found.seconds_per_client:.3g} ms per client,"
        f" weights {_size(found.weight_bytes)},"
        f" {found.clients_per_chunk:.3g} clients per chunk, {_size(found.sum_bytes)} per chunk's sum"
    )
    print(
        f"{'clients':>9} {'chunks':>8} {'out':>9} {'back':>9} {'work s':>9} {'wire s':>9} {'round s':>9}"
    )
    for clients in chosen.clients:
        cost = predict(
            found,
            clients=clients,
            machines=chosen.machines,
            cores=chosen.cores,
            deploy_every=chosen.deploy_every,
            gigabits=chosen.gigabits,
        )
        print(
            f"{clients:>9} {cost.chunks:>8} {_size(cost.bytes_out):>9} {_size(cost.bytes_back):>9}"
            f" {cost.work_seconds:>9.3g} {cost.wire_seconds:>9.3g} {cost.seconds:>9.3g}"
        )


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


if __name__ == "__main__":
    main()
