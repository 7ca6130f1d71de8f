"""Growth behind batch norms: a small CNN on Fashion-MNIST, grown fourfold, with and without the rescaling of filters.

    python benchmarks/batch_norm.py DATA_ROOT [--seeds 3] [--epochs 10] [--device cuda]

DATA_ROOT holds `fashion-mnist/*-ubyte.gz`. Four convolutions with batch norm and ReLU, 8-8-16-16 channels, doubled
at the start of the second and third epoch; SGD under one cycle. Arms: Sprout with and without `rescale`, Sprout with
zero fan-out, GradMax, Random, and the final architecture from scratch. Prints test accuracy after the last epoch.
"""

import argparse
import gzip
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import auxin

BATCH, RATE, MOMENTUM, DECAY = 256, 0.2, 0.9, 5e-4
ARMS: dict[str, tuple[auxin.Method | None, float | None]] = {
    "from scratch": (None, None),
    "Sprout": (auxin.Sprout(), None),
    "Sprout, rescale=False": (auxin.Sprout(rescale=False), None),
    "Sprout, best_update=True": (auxin.Sprout(best_update=True), None),
    "Sprout, zero fan-out": (auxin.Sprout(), 0.0),
    "GradMax": (auxin.GradMax(), None),
    "Random": (auxin.Random(), None),
}


def read(path: Path) -> Tensor:
    """A file of the IDX format."""
    raw = gzip.decompress(path.read_bytes())
    shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(raw[3])]
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).copy()).reshape(shape)


def load(root: Path, split: str, device: str) -> tuple[Tensor, Tensor]:
    """Standardised images and labels."""
    folder = root / "fashion-mnist"
    images = read(folder / f"{split}-images-idx3-ubyte.gz").to(device)
    labels = read(folder / f"{split}-labels-idx1-ubyte.gz").to(device).long()
    return (images[:, None].float() / 255 - 0.286) / 0.353, labels


def network(scale: int) -> nn.Sequential:
    """Four convolutions of 8, 8, 16, 16 times `scale` channels."""
    layers: list[nn.Module] = []
    before = 1
    for index, channels in enumerate((8, 8, 16, 16)):
        channels *= scale
        conv = nn.Conv2d(before, channels, 3, padding=1, stride=2 if index in (1, 3) else 1, bias=False)
        layers += [conv, nn.BatchNorm2d(channels), nn.ReLU()]
        before = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


def run(arm: str, seed: int, epochs: int, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> float:
    """Test accuracy of one arm."""
    torch.manual_seed(seed)
    method, amplitude = ARMS[arm]
    model = network(4 if method is None else 1).to(train[0].device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY, nesterov=True)
    steps = -(-len(train[0]) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=RATE, total_steps=epochs * steps)
    loss = nn.functional.cross_entropy
    for epoch in range(epochs):
        batches = [
            (train[0][part], train[1][part])
            for part in torch.randperm(len(train[0]), device=train[0].device).split(BATCH)
        ]
        if method is not None and epoch in (1, 2):
            sites = auxin.find_sites(model, batches[0][0][:8])
            numbers = {site.name: site.width for site in sites}
            auxin.grow(
                model, batches, loss, optimizer=optimizer, neurons=numbers, sites=sites, method=method,
                amplitude=amplitude, samples=2048,
            )  # fmt: skip
        for x, y in batches:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.no_grad():
        right = [
            (model(x).argmax(1) == y).float() for x, y in zip(test[0].split(1000), test[1].split(1000), strict=True)
        ]
    return float(torch.cat(right).mean()) * 100


def main() -> None:
    """Print a table, a row an arm."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--images", type=int, default=60000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    x, y = load(args.root, "train", args.device)
    train, test = (x[: args.images], y[: args.images]), load(args.root, "t10k", args.device)
    print(
        f"torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, {args.device}, {args.epochs} epochs of {args.images}"
    )
    print("| arm | test accuracy | seconds a run |\n|---|---|---|")
    for arm in ARMS:
        started = time.perf_counter()
        values = [run(arm, seed, args.epochs, train, test) for seed in range(args.seeds)]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        seconds = (time.perf_counter() - started) / args.seeds
        print(f"| {arm} | {statistics.mean(values):.2f} ± {spread:.2f} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
