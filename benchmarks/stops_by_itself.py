"""Does growth stop by itself, at the right width? MLPs from one neuron a layer against a constant width.

    python benchmarks/stops_by_itself.py DATA_ROOT [--sets letter penbased spambase vowel] [--seeds 3] [--json FILE]

DATA_ROOT holds `tabular/NAME.csv`: numeric features with a header, the label last. Both arms: ReLU, AdamW, one cycle,
the same number of steps, one setting for every set. The growing arm has 40 opportunities and keeps a tenth of its
samples for them until growth is over; the other trains on all from the start. FLOPs are multiply-adds of training
(three a weight and sample, for forward and backward); growth itself is given as its share of the time.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import auxin

STEPS, OPPORTUNITIES, BATCH, RATE, CAP, HELD = 16000, 40, 64, 0.01, 256, 0.1
Split = tuple[Tensor, Tensor, Tensor, Tensor]


def load(path: Path, seed: int) -> Split:
    """Standardised features and labels, 80 % for training, split by seed."""
    lines = path.read_text().splitlines()[1:]
    cells = [line.split(",") for line in lines]
    names = sorted({row[-1] for row in cells})
    x = np.array([[float(value) for value in row[:-1]] for row in cells])
    y = np.array([names.index(row[-1]) for row in cells])
    order = np.random.default_rng(seed).permutation(len(x))
    cut = int(0.8 * len(x))
    train, test = order[:cut], order[cut:]
    mean, std = x[train].mean(0), x[train].std(0) + 1e-9
    features = torch.tensor((x - mean) / std, dtype=torch.float32)
    labels = torch.tensor(y)
    return features[train], labels[train], features[test], labels[test]


def mlp(inputs: int, width: int, classes: int) -> nn.Sequential:
    """inputs - width - width - classes."""
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes)
    )


def batches(data: Split, held: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled batches of the training samples from number `held` on, for ever."""
    x, y = data[:2]
    while True:
        order = torch.randperm(len(x) - held) + held
        yield from ((x[part], y[part]) for part in order.split(BATCH))


def run(
    data: Split,
    width: int,
    seed: int,
    grows: bool,
    settings: dict[str, Any] | None = None,
    method: str | auxin.Method = "sprout",
) -> dict[str, Any]:
    """One training run; accuracy, widths, multiply-adds, and the share of time spent in growth."""
    torch.manual_seed(seed)
    x, y, x_test, y_test = data
    model = mlp(x.shape[1], width, int(y.max()) + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=RATE, total_steps=STEPS + 1)
    loss = nn.functional.cross_entropy
    policy = auxin.Policy(total=OPPORTUNITIES, largest=CAP, **(settings or {}))
    grower = auxin.Grower(model, loss, optimizer=optimizer, policy=policy, method=method)
    held = int(HELD * len(x)) if grows else 0
    stream = batches(data, held)
    cost, growing, started = 0, 0.0, time.perf_counter()
    for step in range(1, STEPS + 1):
        inputs, labels = next(stream)
        optimizer.zero_grad()
        loss(model(inputs), labels).backward()
        optimizer.step()
        schedule.step()
        if step % (STEPS // OPPORTUNITIES) == 0:
            cost += 3 * BATCH * (STEPS // OPPORTUNITIES) * auxin.multiply_adds(model, x[:1])
        if grows and not grower.finished and step % (STEPS // OPPORTUNITIES) == 0:
            before = time.perf_counter()
            grower.step(batches(data, held), held_out=[(x[:held], y[:held])])
            growing += time.perf_counter() - before
            stream = batches(data, 0) if grower.finished else stream
    with torch.no_grad():
        accuracy = float((model(x_test).argmax(1) == y_test).float().mean()) * 100
    widths = [module.out_features for module in model if isinstance(module, nn.Linear)][:-1]
    share = growing / (time.perf_counter() - started)
    return {"accuracy": accuracy, "widths": widths, "multiply_adds": cost, "share": share}


def main() -> None:
    """Run both arms on every set and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=Path)
    parser.add_argument("--sets", nargs="+", default=["letter", "penbased", "spambase", "vowel"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    print(f"torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, {STEPS} steps of {BATCH}")
    print("| set | grown widths | grown | constant 64 | difference | FLOPs, grown / constant | time in growth |")
    print("|---|---|---|---|---|---|---|")
    for name in args.sets:
        arms: dict[str, list[dict[str, Any]]] = {"grown": [], "constant": []}
        for seed in range(args.seeds):
            data = load(args.root / "tabular" / f"{name}.csv", seed)
            arms["grown"].append(run(data, 1, seed, True))
            arms["constant"].append(run(data, 64, seed, False))
        results[name] = arms
        print(row(name, arms), flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


def row(name: str, arms: dict[str, list[dict[str, Any]]]) -> str:
    """One line of the table: mean and standard deviation over seeds."""
    figures = {}
    for arm, runs in arms.items():
        values = [result["accuracy"] for result in runs]
        figures[arm] = (statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0)
    widths = ", ".join("-".join(map(str, result["widths"])) for result in arms["grown"])
    cost = sum(r["multiply_adds"] for r in arms["grown"]) / sum(r["multiply_adds"] for r in arms["constant"])
    share = statistics.mean(r["share"] for r in arms["grown"])
    cells = [f"{mean:.2f} ± {spread:.2f}" for mean, spread in figures.values()]
    difference = figures["grown"][0] - figures["constant"][0]
    return f"| {name} | {widths} | {cells[0]} | {cells[1]} | {difference:+.2f} | {cost:.2f} | {share:.0%} |"


if __name__ == "__main__":
    main()
