"""The measurements behind Sprout's and the slack rule's defaults: one setting changed at a time, on tabular sets.

    python benchmarks/defaults.py DATA_ROOT [--sets penbased vowel spambase] [--seeds 3]

The same runs as `stops_by_itself.py` (whose protocol this imports); prints accuracy less that of a constant width of
64, widths, and multiply-adds of training over the constant's.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import auxin
import stops_by_itself as protocol

CHANGES: dict[str, tuple[dict[str, Any], auxin.Method]] = {
    "defaults": ({}, auxin.Sprout()),
    "largest=4": ({}, auxin.Sprout(largest=4.0)),
    "largest=4**9 (unbounded)": ({}, auxin.Sprout(largest=4.0**9)),
    "best_update=True": ({}, auxin.Sprout(best_update=True)),
    "damping=0.1 (not chosen)": ({}, auxin.Sprout(damping=0.1)),
    "confirm=1": ({"confirm": 1}, auxin.Sprout()),
    "errors=2": ({"errors": 2.0}, auxin.Sprout()),
    "rho=0.02": ({"rho": 0.02}, auxin.Sprout()),
    "tied=False": ({"tied": False}, auxin.Sprout()),
    "method=Tiny()": ({}, auxin.Tiny()),
    "method=Random()": ({}, auxin.Random()),
}


def main() -> None:
    """Print a table, a row a change."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=Path)
    parser.add_argument("--sets", nargs="+", default=["penbased", "vowel", "spambase"])
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, {args.seeds} seeds")
    print("| change | " + " | ".join(f"{name}: difference, widths, FLOPs" for name in args.sets) + " |")
    print("|---" * (len(args.sets) + 1) + "|")
    data = {
        (name, seed): protocol.load(args.root / "tabular" / f"{name}.csv", seed)
        for name in args.sets
        for seed in range(args.seeds)
    }
    constant = {key: protocol.run(value, 64, key[1], False) for key, value in data.items()}
    for label, (policy, method) in CHANGES.items():
        cells = []
        for name in args.sets:
            keys = [(name, seed) for seed in range(args.seeds)]
            grown = [protocol.run(data[key], 1, key[1], True, policy, method) for key in keys]
            cells.append(cell(grown, [constant[key] for key in keys]))
        print(f"| {label} | " + " | ".join(cells) + " |", flush=True)


def cell(grown: list[dict[str, Any]], constant: list[dict[str, Any]]) -> str:
    """Mean difference and its standard error over seeds, widths, and the ratio of multiply-adds."""
    gaps = [g["accuracy"] - c["accuracy"] for g, c in zip(grown, constant, strict=True)]
    error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else 0.0
    widths = ", ".join("-".join(map(str, result["widths"])) for result in grown)
    cost = sum(g["multiply_adds"] for g in grown) / sum(c["multiply_adds"] for c in constant)
    return f"{statistics.mean(gaps):+.2f} ± {error:.2f}, {widths}, {cost:.2f}"


if __name__ == "__main__":
    main()
