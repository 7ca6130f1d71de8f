"""What a site is made of: plain records that say which axes of which tensors are as wide as it is.

Layout, stated once. A *width* of `w` neurons stands on one axis of every tensor that it touches, at index
`(a * w + neuron) * inner + b` with `a < outer` and `b < inner`. A Linear or Conv that produces the width has
`outer = inner = 1`; a Linear that reads a flattened `(channels, height, width)` image has `inner = height * width`;
one that reads `(height, width, channels)` flattened has `outer = height * width`.

*Virtual channels* are the producer's input features (its unfolded patches for a convolution, and a constant 1
where it has a bias) seen as channels on the producer's output grid. `Reading.push` carries them to a consumer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, overload

import torch
from rich.markup import escape
from torch import Tensor, nn

from auxin.errors import UnknownNameError, unknown
from auxin.tables import as_text, table

Role = Literal["fan_in", "fan_out", "carried"]


@dataclass(frozen=True)
class Slot:
    """One axis of one tensor (parameter or buffer) that is as wide as the site."""

    module: str
    tensor: str
    axis: int
    role: Role
    outer: int = 1
    inner: int = 1

    @property
    def name(self) -> str:
        """The tensor's dotted name, as in `state_dict`."""
        return f"{self.module}.{self.tensor}" if self.module else self.tensor


@dataclass(frozen=True)
class Count:
    """A module's integer attribute that follows the width: it grows by `times` for every `per` neurons."""

    module: str
    attribute: str
    times: int = 1
    per: int = 1


@dataclass(frozen=True)
class Carrier:
    """A module between producer and consumer that has tensors or groups along the width.

    `kind`: "batch_norm" has running statistics and an affine map, and can be made the identity on a new channel;
    "normaliser" brings whatever enters to size 1 (instance and group norms, a batch norm without affine map);
    "elementwise" has parameters and nothing else (PReLU). New neurons come in whole groups of `group`.
    """

    module: str
    kind: Literal["batch_norm", "normaliser", "elementwise"]
    group: int = 1


@dataclass(frozen=True)
class Reading:
    """How one consumer reads the width.

    `push` is the linearised pass-through from the producer's output to the consumer's input, for any number of
    virtual channels: pooling as an average, activations, norms and dropout as the identity, shapes as they are.
    It takes a tensor in the layout of the producer's output, with the width's axis of any size, and returns one in
    the layout of the consumer's input. `axis`: the width's axis at the consumer's input, counted from the end.
    `norm`: the batch norm that alone reads the consumer's output. `padded`: some position that the consumer reads
    holds padding zeros in the place of the neuron.
    """

    consumer: str
    push: Callable[[Tensor], Tensor] = field(compare=False, repr=False)
    outer: int = 1
    inner: int = 1
    norm: str | None = None
    padded: bool = False


@dataclass(frozen=True)
class Refusal:
    """A width that is not offered, and why. `name` is the module that produces it."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name or 'the model itself'}: {self.reason}"


@dataclass(frozen=True)
class Site:
    """A hidden width that can grow, named after its (first) producer."""

    name: str
    producers: tuple[str, ...]
    readings: tuple[Reading, ...]
    carriers: tuple[Carrier, ...]
    slots: tuple[Slot, ...]
    counts: tuple[Count, ...]
    uses: dict[str, int] = field(compare=False, repr=False)
    """Rows a sample on which each producer and consumer applies its weight (pixels, tokens), on the example."""
    model: nn.Module = field(compare=False, repr=False)
    kinds: Mapping[str, type] = field(default_factory=dict, compare=False, repr=False)
    """The class of every module of the model when the site was found, by name."""

    @property
    def consumers(self) -> tuple[str, ...]:
        """Names of the modules that read the width."""
        return tuple(reading.consumer for reading in self.readings)

    @property
    def width(self) -> int:
        """The present number of neurons, read from the model."""
        slot = self.slots[0]
        return slot_tensor(self.model, slot).shape[slot.axis] // (slot.outer * slot.inner)

    @property
    def group(self) -> int:
        """New neurons come in multiples of this number."""
        return max((carrier.group for carrier in self.carriers), default=1)

    @property
    def normalised(self) -> bool:
        """Whether a norm on the way brings the tiniest neuron to size 1, and cannot be told not to.

        Instance and group norms and batch norms without an affine map do; an affine batch norm is made the identity
        on new neurons.
        """
        return any(carrier.kind == "normaliser" for carrier in self.carriers)

    @property
    def parameters_per_neuron(self) -> int:
        """How many parameters one more neuron brings."""
        return sum(
            per_neuron(slot_tensor(self.model, slot), slot)
            for slot in self.slots
            if isinstance(slot_tensor(self.model, slot), nn.Parameter)
        )

    @property
    def multiply_adds_per_neuron(self) -> int:
        """How many multiply-adds a sample one more neuron costs in its producers and consumers."""
        weights = (slot for slot in self.slots if slot.tensor == "weight" and slot.role != "carried")
        return sum(per_neuron(slot_tensor(self.model, s), s) * self.uses[s.module] for s in weights)

    def __repr__(self) -> str:
        return f"Site({self.name!r}, width={self.width}, consumers={list(self.consumers)})"


@dataclass(frozen=True)
class Change:
    """What is to be done to one site: a proposal in the layout of the model's tensors.

    `new`: for every slot of the site, the entries of the new neurons, (..., outer, k, inner, ...); a size of 1
    broadcasts. `updates`: by tensor name, what is added to the old entries. `factors`: by tensor name, what the
    tensor is multiplied by at the end (the function stays: a norm follows), optimizer state along with it.
    `keep`: the old neurons that stay, in order; None keeps all.
    """

    site: Site
    count: int
    new: dict[Slot, Tensor]
    updates: dict[str, Tensor] = field(default_factory=dict)
    factors: dict[str, Tensor] = field(default_factory=dict)
    keep: Tensor | None = None


@dataclass(frozen=True)
class Sites(Sequence[Site]):
    """The sites of a model, in the order of its forward pass, and what was refused."""

    items: tuple[Site, ...]
    refused: tuple[Refusal, ...] = ()

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Site]:
        return iter(self.items)

    @overload
    def __getitem__(self, key: str) -> Site: ...
    @overload
    def __getitem__(self, key: int) -> Site: ...
    @overload
    def __getitem__(self, key: slice) -> "Sites": ...
    def __getitem__(self, key: str | int | slice) -> "Site | Sites":
        if isinstance(key, slice):
            return Sites(self.items[key], self.refused)
        if isinstance(key, int):
            return self.items[key]
        for site in self.items:
            if key == site.name or key in site.producers:
                return site
        raise self.missing(key)

    def __contains__(self, key: object) -> bool:
        return any(key in (site, site.name) for site in self.items)

    def missing(self, key: object) -> UnknownNameError:
        """The error for a name that is no site: why it was refused, or the near matches."""
        for refusal in self.refused:
            if key == refusal.name:
                return UnknownNameError(f"no site {key!r}, it was refused: {refusal.reason}")
        return unknown("site", key, [site.name for site in self.items])

    def __str__(self) -> str:
        rows = [(site.name, str(site.width), ", ".join(site.consumers)) for site in self.items]
        refused = [f"refused: {refusal}" for refusal in self.refused]
        return as_text(table(f"{len(rows)} sites", ("site", "width", "read by"), rows), *map(escape, refused))


def slot_tensor(model: nn.Module, slot: Slot) -> Tensor:
    """The parameter or buffer of a slot, as it is now."""
    tensor = getattr(model.get_submodule(slot.module), slot.tensor)
    if not torch.is_tensor(tensor):
        raise TypeError(f"{slot.name} holds {type(tensor).__name__}, not a tensor")
    return tensor


def per_neuron(tensor: Tensor, slot: Slot) -> int:
    """How many entries of `tensor` belong to one neuron."""
    entries = slot.outer * slot.inner
    for axis, size in enumerate(tensor.shape):
        entries *= 1 if axis == slot.axis % tensor.dim() else size
    return entries


def split_axis(tensor: Tensor, slot: Slot) -> Tensor:
    """View of shape (..., outer, width, inner, ...) of a tensor along its slot's axis."""
    axis = slot.axis % tensor.dim()
    width = tensor.shape[axis] // (slot.outer * slot.inner)
    return torch.unflatten(tensor, axis, (slot.outer, width, slot.inner))


def widened(tensor: Tensor, slot: Slot, new: Tensor) -> Tensor:
    """`tensor` with the neurons `new` behind the old ones.

    Shapes: `tensor` (..., outer * w * inner, ...); `new` (..., outer, k, inner, ...), broadcast against it;
    the result (..., outer * (w + k) * inner, ...), in the memory format of `tensor`.
    """
    axis = slot.axis % tensor.dim()
    old = split_axis(tensor, slot)
    shape = list(old.shape)
    shape[axis + 1] = new.shape[axis + 1]
    joined = torch.cat([old, new.to(old).expand(shape)], dim=axis + 1).flatten(axis, axis + 2)
    return like_format(joined, tensor)


def like_format(tensor: Tensor, example: Tensor) -> Tensor:
    """`tensor` contiguous in the memory format of `example` (channels_last or the usual one)."""
    wanted = memory_format(example)
    if wanted is torch.contiguous_format:
        return tensor.contiguous()
    return torch.empty_like(tensor, memory_format=wanted).copy_(tensor)


def memory_format(tensor: Tensor) -> torch.memory_format:
    """`torch.channels_last`, `torch.channels_last_3d` or `torch.contiguous_format`.

    A tensor with one channel or one pixel is contiguous in both ways: the strides tell which was meant.
    """
    wanted = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if wanted is None or not tensor.is_contiguous(memory_format=wanted):
        return torch.contiguous_format
    usual = torch.empty(tensor.shape, device="meta").stride()
    return torch.contiguous_format if tensor.stride() == usual else wanted
