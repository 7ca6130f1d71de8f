"""What growth costs: statistics and solve over a plain forward and backward pass, in one process, one thread.

    python benchmarks/speed.py [--repeats 11]

Two cases: an MLP 784-64-64-10 on a batch of 1,024, and a pair of 3x3 convolutions 64-16-64 on 16x16 pixels and a
batch of 128. Statistics: every pass that Prop. 3.1 and 3.2 need, the model's own forward and backward included.
Solve: all new neurons of every site. Processor time, and the median of the repeats; the runs that are compared take
turns, each after a run of its own that is not counted, so that neighbours on the machine and cold caches favour none.
Peer: gromo 0.1.0 as published, measured on the same two cases (statistics 6.6-7.2 and 53-54, solve 25-29 and 1.6-1.8).
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import auxin
from auxin.collect import Kept, Measurement, one_fold
from auxin.growth import prop1
from auxin.isolation import isolated
from auxin.linalg import new_neurons
from auxin.methods import SiteView
from auxin.moments import consumer_sums, site_means
from auxin.objectives import Supervised


class Pair(nn.Module):
    """Two convolutions and the mean over pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(64, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 64, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 64) class scores."""
        return self.second(torch.relu(self.first(x))).mean((2, 3))


def first_batch(samples: int, *shape: int) -> Tensor:
    """The first batch of a standardised data set of ten.

    Every training process has once held and let go of a data set; from then on glibc keeps the matrices that are freed
    in the process. In one that never held anything large, it hands them back to the kernel in every run, and the MLP
    pays 7 ms of page faults for it (a ratio of 10.3 to 10.9 in the place of 9).
    """
    data = torch.randn(10 * samples, *shape)
    data = (data - data.mean(0)) / data.std(0)
    return data[:samples].clone()


def cases() -> dict[str, tuple[nn.Module, Tensor, Tensor]]:
    """Name: model, input, target."""
    mlp = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return {
        "MLP 784-64-64-10, batch 1024": (mlp, first_batch(1024, 784), torch.randint(10, (1024,))),
        "convolutions 64-16-64, 16x16, batch 128": (Pair(), first_batch(128, 64, 16, 16), torch.randint(64, (128,))),
    }


def medians(runs: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Median seconds of each run: they take turns, and of two in a row the second counts."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, taken in zip(runs, times, strict=True):
            run()
            started = time.process_time()
            run()
            taken.append(time.process_time() - started)
    return [statistics.median(taken) for taken in times]


def plain(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """One forward and backward pass."""
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()


def measured(model: nn.Module, x: Tensor, y: Tensor, sites: auxin.Sites) -> list[SiteView]:
    """All statistics of all sites on one batch, and the best updates that they need."""
    measurement = Measurement(
        model, Supervised(nn.functional.cross_entropy), sites, one_fold([Kept((x, y), len(x), 0)])
    )
    with isolated(model):
        consumers = consumer_sums(measurement, ["estimate"])
        updates = {
            name: prop1(model, name, consumers[name, "estimate"], 0.0) for site in sites for name in site.consumers
        }
        producers = site_means(measurement, updates, ["estimate"])
    return [SiteView(site, measurement, torch.Generator(), updates, consumers, producers, 1e-7) for site in sites]


def solved(views: list[SiteView]) -> None:
    """All new neurons of every site."""
    for view in views:
        new_neurons(view.s(), view.n(), None, 0.0, view.constant, precision=view.precision)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=11)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, one thread")
    print("| case | plain (ms) | statistics / plain | solve / plain | together | peer |")
    print("|---|---|---|---|---|---|")
    for (name, (model, x, y)), peer in zip(cases().items(), (33, 55), strict=True):
        sites = auxin.find_sites(model, x[:4])
        runs = (
            lambda: plain(model, x, y),  # noqa: B023
            lambda: measured(model, x, y, sites),  # noqa: B023
            lambda: solved(measured(model, x, y, sites)),  # noqa: B023
        )
        base, gathered, together = medians(runs, repeats)
        parts = f"{gathered / base:.1f} | {(together - gathered) / base:.1f} | {together / base:.1f}"
        print(f"| {name} | {1e3 * base:.1f} | {parts} | {peer} |", flush=True)


if __name__ == "__main__":
    main()
