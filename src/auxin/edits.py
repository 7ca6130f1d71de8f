"""What happens to one tensor when sites change: a draft of its new value, and the steps that led there.

The steps are kept because a parameter is not alone: its gradient and its optimizer state follow it through the same
steps, each by its own `Rule`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from auxin.errors import InputError
from auxin.structure import Slot, like_format, memory_format, split_axis, widened


@dataclass(frozen=True)
class Rule:
    """How a tensor follows a parameter.

    `fill`: what stands where neurons are new; "mean" is the mean of the tensor's old entries (0 without any), "own"
    the parameter's own new entries. `degree`: a parameter times s takes the tensor times s ** degree. `reduced`: the
    axis over which the tensor holds one value (a factored moment), counted from the end.
    """

    fill: Literal["zero", "one", "mean", "own"]
    degree: int = 0
    reduced: int | None = None

    def shape(self, parameter: Tensor) -> tuple[int, ...]:
        """The shape of the tensor beside `parameter`."""
        reduced = None if self.reduced is None else self.reduced % parameter.dim()
        return tuple(1 if axis == reduced else size for axis, size in enumerate(parameter.shape))


GRADIENT = Rule("zero", degree=-1)
ITSELF = Rule("own", degree=1)
ADDEND = Rule("zero")
FACTOR = Rule("one")


class Step(Protocol):
    """One thing that is done to a parameter."""

    def follow(self, tensor: Tensor, rule: Rule) -> Tensor:
        """`tensor` after the step, by its rule."""
        ...


@dataclass(frozen=True)
class Resize:
    """Neurons kept (`keep`, all if None) and neurons appended (`new`, (..., outer, k, inner, ...)) along a slot."""

    slot: Slot
    axis: int
    keep: Tensor | None
    new: Tensor

    def follow(self, tensor: Tensor, rule: Rule) -> Tensor:
        """`tensor` with the same neurons selected, and new ones by the rule's fill."""
        if rule.reduced is not None and self.axis == rule.reduced % tensor.dim():
            return tensor
        kept = tensor if self.keep is None else selected(tensor, self.slot, self.keep)
        return widened(kept, self.slot, self._fill(kept, rule))

    def _fill(self, tensor: Tensor, rule: Rule) -> Tensor:
        if rule.fill == "own":
            return self.new
        entries = blank(tensor, self.slot, self.new.shape[self.axis + 1])
        if rule.fill == "mean":
            return entries + tensor.mean() if tensor.numel() else entries
        return entries + 1 if rule.fill == "one" else entries


@dataclass(frozen=True)
class Scale:
    """The parameter times `factor` (broadcast)."""

    factor: Tensor

    def follow(self, tensor: Tensor, rule: Rule) -> Tensor:
        """`tensor` times the factor to the power of the rule's degree; averaged where the tensor is a mean."""
        power = self.factor**rule.degree
        if rule.reduced is not None:
            power = power.mean(dim=rule.reduced, keepdim=True)
        return like_format((tensor * power.to(tensor.device)).to(tensor.dtype), tensor)


@dataclass
class Draft:
    """The value that a tensor of the model is going to have."""

    name: str
    tensor: Tensor
    value: Tensor
    steps: list[Step] = field(default_factory=list)
    resizes: list[Resize] = field(default_factory=list)

    @property
    def touched(self) -> bool:
        """Whether anything was drafted."""
        return self.value is not self.tensor

    @property
    def replaced(self) -> bool:
        """Whether the tensor gets new storage; else its entries are written in place."""
        layout = zip(self.tensor.shape, self.tensor.stride(), strict=True)
        overlapping = any(size > 1 and stride == 0 for size, stride in layout)  # cannot be written
        return bool(self.resizes) or overlapping or memory_format(self.value) != memory_format(self.tensor)

    def add(self, update: Tensor) -> None:
        """Add to the entries; an update made for the size before all drafting is zero where neurons are new."""
        addend = self._fitted(update, ADDEND, self._axes())
        self.value = like_format((self.value + addend).to(self.value.dtype), self.value)

    def resize(self, slot: Slot, count: int, new: Tensor | None, keep: Tensor | None) -> None:
        """Keep neurons and append `count` others along a slot, (..., outer, count, inner, ...); zeros if None."""
        axis = slot.axis % self.value.dim()
        if new is None:
            new = blank(self.value, slot, count)
        flat = self._flat_entries(slot, axis, count, new)
        others = [other for other in self._axes() if other != axis]
        flat = self._fitted(flat, ADDEND, others, free=axis)
        step = Resize(slot, axis, keep, torch.unflatten(flat, axis, (slot.outer, count, slot.inner)))
        self.value = step.follow(self.value, ITSELF)
        self.steps.append(step)
        self.resizes.append(step)

    def scale(self, factor: Tensor, own_axes: Iterable[int]) -> None:
        """Multiply; along `own_axes` a factor of size 1 holds for every entry, elsewhere for the old ones alone."""
        if not (torch.isfinite(factor).all() and (factor != 0).all()):
            raise InputError(f"factors of {self.name} hold 0, NaN or infinity; every factor must be finite and not 0")
        spread = {axis for axis in own_axes if factor.dim() == self.value.dim() and factor.shape[axis] == 1}
        fitted = self._fitted(factor, FACTOR, [axis for axis in self._axes() if axis not in spread])
        step = Scale(fitted)
        self.value = step.follow(self.value, ITSELF)
        self.steps.append(step)

    def become(self, value: Tensor) -> None:
        """Take the place of whatever was drafted."""
        self.value = _broadcast(value.to(self.tensor.device), list(self.value.shape), self.name)

    def follow(self, tensor: Tensor, rule: Rule) -> Tensor:
        """`tensor` after all steps."""
        for step in self.steps:
            tensor = step.follow(tensor, rule)
        return tensor

    def _axes(self) -> list[int]:
        return list(range(self.value.dim()))

    def _flat_entries(self, slot: Slot, axis: int, count: int, new: Tensor) -> Tensor:
        """New entries with (outer, count, inner) as the one axis that they have in the tensor."""
        if new.dim() != self.value.dim() + 2 or new.shape[axis + 1] != count:
            raise InputError(
                f"new entries of {self.name} have shape {tuple(new.shape)}; {self.value.dim() + 2} axes with {count} "
                f"neurons on axis {axis + 1} are expected"
            )
        shape = list(new.shape)
        shape[axis], shape[axis + 2] = slot.outer, slot.inner
        return _broadcast(new, shape, self.name).flatten(axis, axis + 2)

    def _fitted(self, entries: Tensor, rule: Rule, axes: Iterable[int], free: int | None = None) -> Tensor:
        """Entries made for the size before all drafting, carried through what was drafted since.

        Entries that have the present size, or size 1, stay as they are. Axis `free` may have any size.
        """
        entries = entries.to(self.value.device)
        shape = list(self.value.shape)
        if entries.dim() == len(shape):
            for axis in axes:
                entries = self._carried(entries, rule, axis)
            if free is not None:
                shape[free] = entries.shape[free]
        return _broadcast(entries, shape, self.name)

    def _carried(self, entries: Tensor, rule: Rule, axis: int) -> Tensor:
        if entries.shape[axis] != self.tensor.shape[axis]:
            return entries
        for step in self.resizes:
            entries = step.follow(entries, rule) if step.axis == axis else entries
        return entries


def selected(tensor: Tensor, slot: Slot, keep: Tensor) -> Tensor:
    """`tensor` with the neurons `keep` alone along a slot, in that order."""
    axis = slot.axis % tensor.dim()
    chosen = split_axis(tensor, slot).index_select(axis + 1, keep.to(tensor.device))
    return like_format(chosen.flatten(axis, axis + 2), tensor)


def blank(tensor: Tensor, slot: Slot, count: int) -> Tensor:
    """Zeros for `count` new neurons of a tensor, (1, ..., count, ..., 1)."""
    shape = [1] * (tensor.dim() + 2)
    shape[slot.axis % tensor.dim() + 1] = count
    return tensor.new_zeros(shape)


def _broadcast(tensor: Tensor, shape: list[int], name: str) -> Tensor:
    try:
        return tensor.expand(shape)
    except RuntimeError:
        raise InputError(
            f"entries of shape {tuple(tensor.shape)} do not fit {name}, which takes {tuple(shape)} or sizes of 1"
        ) from None
