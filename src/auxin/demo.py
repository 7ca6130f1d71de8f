"""The demo: an MLP on scikit-learn's digits grows from one neuron a layer until it stops by itself.

Beside it, the architecture that it ends with is trained from scratch at equal training FLOPs, and its seed is
trained as long without growing.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean, stdev
from time import perf_counter

import torch
from torch import Tensor, nn

from auxin import Grower, Policy
from auxin.errors import MissingExtraError
from auxin.history import Growth, History
from auxin.report import Epoch

GROWN, SCRATCH, SEED = "grown", "from scratch", "seed"
PIXELS, CLASSES = 64, 10
# A sample costs two FLOPs a weight in the forward pass, and twice as much again in the backward pass.
FLOPS_PER_WEIGHT = 6


@dataclass(frozen=True)
class Settings:
    """How the demo trains; every run of it the same way."""

    seeds: int = 3
    epochs: int = 40
    batch: int = 32
    measured_batch: int = 256
    rate: float = 0.003
    weight_decay: float = 0.01
    test_share: float = 0.25
    seed_widths: tuple[int, ...] = (1, 1)


@dataclass(frozen=True)
class Digits:
    """Handwritten digits, (n, 64) pixels between 0 and 1 and their classes, split in two."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor

    def batches(self, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """The training samples once, in random order, in batches of equal size."""
        order = torch.randperm(len(self.train_x), generator=generator)
        for rows in order[: len(order) // size * size].split(size):
            yield self.train_x[rows], self.train_y[rows]


@dataclass(frozen=True)
class Run:
    """One training run, and what came of it."""

    name: str
    seed: int
    widths: tuple[int, ...]
    accuracy: float
    parameters: int
    flops: int
    seconds: float
    epochs: list[Epoch]
    history: History = field(default_factory=History)


Observer = Callable[[str, int, Epoch, Growth | None], None]


def run_demo(settings: Settings, observer: Observer) -> list[Run]:
    """Every run of the demo; `observer` is called at the end of each epoch: name of the run, seed, epoch, growth."""
    threads = torch.get_num_threads()
    # Matrices this small are slower on several threads.
    torch.set_num_threads(1)
    try:
        return [run for seed in range(settings.seeds) for run in runs_of_seed(seed, settings, observer)]
    finally:
        torch.set_num_threads(threads)


def runs_of_seed(seed: int, settings: Settings, observer: Observer) -> Iterator[Run]:
    """The three runs of one seed, on the same split of the data."""
    digits = load_digits(seed, settings.test_share)
    steps = settings.epochs * (len(digits.train_x) // settings.batch)
    grown = train(GROWN, seed, settings.seed_widths, steps, digits, settings, observer)
    yield grown
    cost = FLOPS_PER_WEIGHT * settings.batch * weights(mlp(grown.widths, seed))
    yield train(SCRATCH, seed, grown.widths, max(1, round(grown.flops / cost)), digits, settings, observer)
    yield train(SEED, seed, settings.seed_widths, steps, digits, settings, observer)


def load_digits(seed: int, test_share: float) -> Digits:
    """scikit-learn's 1797 digits, split at random with the same share of each class on both sides."""
    try:
        from sklearn.datasets import load_digits as load
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise MissingExtraError(
            "the demo reads its digits from scikit-learn, which is not installed; pip install 'auxin[demo]'"
        ) from error
    pixels, classes = load(return_X_y=True)
    split = train_test_split(pixels, classes, test_size=test_share, stratify=classes, random_state=seed)
    train_x, test_x = (torch.tensor(part / 16, dtype=torch.float32) for part in split[:2])
    train_y, test_y = (torch.tensor(part, dtype=torch.int64) for part in split[2:])
    return Digits(train_x, train_y, test_x, test_y)


def mlp(widths: Sequence[int], seed: int) -> nn.Sequential:
    """An MLP on the digits with these hidden widths."""
    torch.manual_seed(seed)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for index, (inputs, outputs) in enumerate(pairwise((PIXELS, *widths)), 1):
        layers |= {f"layer{index}": nn.Linear(inputs, outputs), f"selu{index}": nn.SELU()}
    return nn.Sequential(layers | {"output": nn.Linear(widths[-1], CLASSES)})


def train(
    name: str,
    seed: int,
    start: Sequence[int],
    steps: int,
    digits: Digits,
    settings: Settings,
    observer: Observer,
) -> Run:
    """Train an MLP that starts at the widths `start`, and grow it on the way if that is what `name` says."""
    model = mlp(start, seed)
    loss = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), settings.rate, weight_decay=settings.weight_decay)
    grower = Grower(model, loss, optimizer=optimizer, policy=Policy(total=settings.epochs)) if name == GROWN else None
    generator = torch.Generator().manual_seed(seed)
    epochs: list[Epoch] = []
    started, flops = perf_counter(), 0
    for epoch, (count, value) in enumerate(train_epochs(model, loss, optimizer, steps, digits, settings.batch), 1):
        flops += FLOPS_PER_WEIGHT * settings.batch * weights(model) * count
        epochs.append(measure(model, epoch, value, digits))
        # A few large batches are measured faster than many small ones.
        growth = grower.step(digits.batches(settings.measured_batch, generator)) if grower else None
        observer(name, seed, epochs[-1], growth)
    final = measure(model, len(epochs), epochs[-1].loss, digits)
    history = grower.history if grower else History()
    took = perf_counter() - started
    return Run(name, seed, widths(model), final.accuracy, final.parameters, flops, took, epochs, history)


def train_epochs(
    model: nn.Module, loss: nn.Module, optimizer: torch.optim.Optimizer, steps: int, digits: Digits, batch: int
) -> Iterator[tuple[int, float]]:
    """Train for `steps` steps under one cycle of the learning rate; each epoch yields its steps and mean loss."""
    rate = optimizer.param_groups[0]["lr"]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    generator = torch.Generator().manual_seed(0)
    left = steps
    while left:
        losses = []
        for x, y in digits.batches(batch, generator):
            if not left:
                break
            optimizer.zero_grad()
            value = loss(model(x), y)
            value.backward()
            optimizer.step()
            schedule.step()
            losses.append(value.item())
            left -= 1
        yield len(losses), mean(losses)


def measure(model: nn.Sequential, epoch: int, loss: float, digits: Digits) -> Epoch:
    """The accuracy on the test samples, and the size of the model."""
    with torch.no_grad():
        right = (model(digits.test_x).argmax(1) == digits.test_y).float().mean().item()
    names = {name: layer.out_features for name, layer in linears(model)[:-1]}
    return Epoch(epoch, loss, right, sum(p.numel() for p in model.parameters()), names)


def linears(model: nn.Sequential) -> list[tuple[str, nn.Linear]]:
    """The Linear layers with their names."""
    return [(name, layer) for name, layer in model.named_children() if isinstance(layer, nn.Linear)]


def widths(model: nn.Sequential) -> tuple[int, ...]:
    """The hidden widths."""
    return tuple(layer.out_features for _, layer in linears(model)[:-1])


def weights(model: nn.Sequential) -> int:
    """The number of weights without biases: multiply-adds a sample."""
    return sum(layer.weight.numel() for _, layer in linears(model))


@dataclass(frozen=True)
class Summary:
    """The runs of one name over all seeds: means, and the standard deviation of the accuracy."""

    name: str
    widths: list[tuple[int, ...]]
    accuracy: float
    spread: float
    parameters: float
    flops: float
    seconds: float


def summarise(runs: Sequence[Run]) -> list[Summary]:
    """One summary for each name, in the order of the runs."""
    return [summary_of([run for run in runs if run.name == name]) for name in dict.fromkeys(run.name for run in runs)]


def summary_of(runs: Sequence[Run]) -> Summary:
    """The summary of runs that differ in their seed alone."""
    accuracies = [run.accuracy for run in runs]
    return Summary(
        runs[0].name,
        [run.widths for run in runs],
        mean(accuracies),
        stdev(accuracies) if len(runs) > 1 else 0.0,
        mean(run.parameters for run in runs),
        mean(run.flops for run in runs),
        mean(run.seconds for run in runs),
    )
