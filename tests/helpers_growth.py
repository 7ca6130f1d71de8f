"""What growth must leave alone, bit by bit, and small tasks to grow on."""

import copy
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import helpers_surgery

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")

Batch = tuple[Tensor, Tensor]


def everything(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """All that bad input or a fault must leave bitwise as it was."""
    return {
        **helpers_surgery.snapshot(model, *optimizers),
        "groups": [[_plain(group) for group in optimizer.param_groups] for optimizer in optimizers],
        "python": random.getstate(),
        "numpy": [part.tobytes() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
        "training": [module.training for module in model.modules()],
        "hooks": [[list(getattr(module, name)) for name in HOOKS] for module in model.modules()],
        "keys": [sorted(vars(module)) for module in model.modules()],
        "flags": [parameter.requires_grad for parameter in model.parameters()],
        "tensor hooks": [parameter._backward_hooks for parameter in model.parameters()],
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()),
    }


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    return {**group, "params": [id(parameter) for parameter in group["params"]]}


@contextmanager
def untouched(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Iterator[None]:
    """Everything is as before at the end, whatever happened inside."""
    before = everything(model, *optimizers)
    try:
        yield
    finally:
        after = everything(model, *optimizers)
        changed = [name for name in before if before[name] != after[name]]
        assert changed == []


def mlp(*widths: int, activation: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
    """Linear layers of the given widths with an activation between them, the same at every call."""
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for ins, outs in itertools.pairwise(widths):
        layers += [nn.Linear(ins, outs), activation()]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Sequential:
    """conv - batch norm - ReLU - conv - pool - linear on 2 x 6 x 6 images, 3 classes."""
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


def batches(*shape: int, count: int = 2, size: int = 24, classes: int = 3, seed: int = 5) -> list[Batch]:
    """Random inputs with class targets that depend on them."""
    generator = torch.Generator().manual_seed(seed)
    teacher = torch.randn(torch.Size(shape).numel(), classes, generator=generator)
    inputs = [torch.randn(size, *shape, generator=generator) for _ in range(count)]
    return [(x, (x.flatten(1) @ teacher).square().argmax(1)) for x in inputs]


def double(data: list[Batch]) -> list[Batch]:
    """The same with inputs in float64."""
    return [(x.double(), y) for x, y in data]


def trained(model: nn.Module, data: list[Batch], optimizer: torch.optim.Optimizer, steps: int = 3) -> nn.Module:
    """The model after a few steps, its last gradients left in place."""
    for _ in range(steps):
        for x, y in data:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model


def fresh(model: nn.Module) -> nn.Module:
    """A deep copy."""
    return copy.deepcopy(model)
