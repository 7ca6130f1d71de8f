"""Widening a copy by hand, independent of the finder's own proof and of the surgery."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from auxin.structure import Site, Slot, slot_tensor, widened


class Fn(nn.Module):
    """A module whose forward is a function of it and of the inputs."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def random_neurons(model: nn.Module, slot: Slot, count: int) -> Tensor:
    """Positive random entries (..., outer, count, inner, ...)."""
    tensor = slot_tensor(model, slot)
    shape = [*tensor.shape[: slot.axis], slot.outer, count, slot.inner, *tensor.shape[slot.axis + 1 :]]
    return torch.rand(shape, dtype=tensor.dtype) + 0.1


def wider(model: nn.Module, site: Site, count: int, zero: tuple[str, ...] = ("fan_out",)) -> nn.Module:
    """A copy of `model` with `count` random neurons in `site`, the slots of the roles in `zero` at 0."""
    copied = copy.deepcopy(model)
    for slot in site.slots:
        new = random_neurons(copied, slot, count) * (slot.role not in zero)
        module = copied.get_submodule(slot.module)
        grown = widened(slot_tensor(copied, slot).detach(), slot, new)
        if slot.tensor in module._parameters:
            grown = nn.Parameter(grown)
        setattr(module, slot.tensor, grown)
    for number in site.counts:
        module = copied.get_submodule(number.module)
        value = getattr(module, number.attribute)
        setattr(module, number.attribute, value + number.times * count // number.per)
    return copied


def seen_by(model: nn.Module, name: str, example: Tensor) -> tuple[Tensor, Tensor]:
    """Input and output of a submodule in one pass."""
    seen: list[tuple[Tensor, Tensor]] = []
    hook = model.get_submodule(name).register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
    try:
        with torch.no_grad():
            model(example)
    finally:
        hook.remove()
    return seen[0]
