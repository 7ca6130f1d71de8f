"""Does growth stop by itself, at the right width? MLPs from one neuron a layer against a constant width.

    python benchmarks/stops_by_itself.py DATA_ROOT [--sets letter penbased spambase vowel] [--seeds 3] [--json FILE]

DATA_ROOT holds `tabular/NAME.csv`: numeric features with a header, the label last. Both arms: ReLU, AdamW, one cycle,
the same epochs and batches, one setting for every set. FLOPs are multiply-adds of training (forward and backward,
three per weight and sample); those of growth itself are counted apart, by the passes that it makes.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import auxin

EPOCHS, BATCH, RATE, CAP = 40, 128, 0.01, 256
POLICY: dict = {}
HELD = 0.2
METHOD = auxin.Sprout()
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


def run(data: Split, width: int, seed: int, grows: bool) -> dict[str, float | list[int]]:
    """One training run; accuracy, widths, multiply-adds."""
    torch.manual_seed(seed)
    x, y, x_test, y_test = data
    held = int(HELD * len(x)) if grows else 0
    held_out = [(x[:held], y[:held])]
    classes = int(y.max()) + 1
    model = mlp(x.shape[1], width, classes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    batches = -(-len(x) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=RATE, total_steps=EPOCHS * batches + 1)
    loss = nn.functional.cross_entropy
    policy = auxin.Policy(total=EPOCHS, largest=CAP, **POLICY)
    grower = auxin.Grower(model, loss, optimizer=optimizer, policy=policy, method=METHOD)
    cost, started, growing = 0, time.perf_counter(), 0.0
    for _ in range(EPOCHS):
        order = torch.randperm(len(x))
        order = order[order >= held] if not grower.finished else order
        pieces = [(x[part], y[part]) for part in order.split(BATCH)]
        for inputs, labels in pieces:
            optimizer.zero_grad()
            loss(model(inputs), labels).backward()
            optimizer.step()
            schedule.step()
        cost += 3 * len(x) * auxin.multiply_adds(model, x[:1])
        if grows:
            before = time.perf_counter()
            grower.step(pieces, held_out=held_out)
            growing += time.perf_counter() - before
    with torch.no_grad():
        accuracy = float((model(x_test).argmax(1) == y_test).float().mean()) * 100
    widths = [module.out_features for module in model if isinstance(module, nn.Linear)][:-1]
    seconds = time.perf_counter() - started
    return {"accuracy": accuracy, "widths": widths, "multiply_adds": cost, "seconds": seconds, "growing": growing}


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
    print(f"torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, {EPOCHS} epochs")
    print("| set | grown widths | grown | constant 64 | difference | FLOPs, grown / constant | time in growth |")
    print("|---|---|---|---|---|---|---|")
    for name in args.sets:
        arms = {"grown": [], "constant": []}
        for seed in range(args.seeds):
            data = load(args.root / "tabular" / f"{name}.csv", seed)
            arms["grown"].append(run(data, 1, seed, True))
            arms["constant"].append(run(data, 64, seed, False))
        results[name] = arms
        print(row(name, arms), flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


def row(name: str, arms: dict[str, list[dict]]) -> str:
    """One line of the table: mean and standard deviation over seeds."""
    figures = {}
    for arm, runs in arms.items():
        values = [result["accuracy"] for result in runs]
        figures[arm] = (statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0)
    widths = ", ".join("-".join(map(str, result["widths"])) for result in arms["grown"])
    cost = sum(r["multiply_adds"] for r in arms["grown"]) / sum(r["multiply_adds"] for r in arms["constant"])
    share = sum(r["growing"] for r in arms["grown"]) / sum(r["seconds"] for r in arms["grown"])
    cells = [f"{mean:.2f} ± {spread:.2f}" for mean, spread in figures.values()]
    difference = figures["grown"][0] - figures["constant"][0]
    return f"| {name} | {widths} | {cells[0]} | {cells[1]} | {difference:+.2f} | {cost:.2f} | {share:.0%} |"


if __name__ == "__main__":
    main()
