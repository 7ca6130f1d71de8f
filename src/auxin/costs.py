"""What a model costs: parameters, and multiply-adds a sample in its linear and convolution layers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from auxin.isolation import isolated
from auxin.objectives import call, first_tensor

WEIGHED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def parameters(model: nn.Module) -> int:
    """The number of parameters."""
    return sum(p.numel() for p in model.parameters())


def multiply_adds(model: nn.Module, example: Any) -> int:
    """Multiply-adds a sample of every Linear and Conv layer, on one batch's input.

    >>> multiply_adds(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), torch.zeros(5, 4))
    18
    """
    total = 0

    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        nonlocal total
        weight = module.get_parameter("weight")
        if weight.shape[0]:
            total += weight.numel() * (output.numel() // weight.shape[0])

    with isolated(model), torch.no_grad(), _hooked(model, hook):
        call(model, example)
    return total // first_tensor(example).shape[0]


class _hooked:
    def __init__(self, model: nn.Module, hook: Callable[..., None]) -> None:
        self.handles: list[Any] = []
        self.model, self.hook = model, hook

    def __enter__(self) -> None:
        weighed = [module for module in self.model.modules() if isinstance(module, WEIGHED)]
        self.handles = [module.register_forward_hook(self.hook) for module in weighed]

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()
