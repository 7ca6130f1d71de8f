"""How a width flows through a forward pass: the layout of a tensor that carries it, and the path it came by.

Every axis of a tensor is an ordered product of *atoms* (`Atom`), outermost first; one atom is the width. Merging
axes joins their atoms, splitting an axis parts them, and pooling puts a new atom in the place of the old ones. A
path (`Push`) is the list of steps that change the layout; sizes are read from the tensor when it is replayed.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from auxin.structure import Carrier, Count, Slot

WIDTH = 0


class Refused(Exception):
    """A use of a width that does not let it grow; the text completes "it is ..."."""


class Atom(NamedTuple):
    """A factor of an axis: a name within one path, and its size on the example."""

    name: int
    size: int


Axis = tuple[Atom, ...]


class Step(Protocol):
    """One change of layout; `sizes` holds the size of every atom so far and is updated."""

    def __call__(self, tensor: Tensor, sizes: dict[int, int]) -> Tensor:
        """The tensor after the step."""


@dataclass(frozen=True)
class Apply:
    """A torch function, called with the arguments of the trace; `renewed` axes get new atoms."""

    function: Callable[..., Tensor]
    args: tuple[Any, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    renewed: tuple[tuple[int, int], ...] = ()

    def __call__(self, tensor: Tensor, sizes: dict[int, int]) -> Tensor:
        """`function(tensor, *args, **options)`."""
        tensor = self.function(tensor, *self.args, **dict(self.options))
        sizes.update({atom: tensor.shape[axis] for axis, atom in self.renewed})
        return tensor


@dataclass(frozen=True)
class Reshape:
    """New axes from old atoms; `splits` lists (old, first, second, size of second), the first being what is left."""

    axes: tuple[tuple[int, ...], ...]
    splits: tuple[tuple[int, int, int, int], ...] = ()

    def __call__(self, tensor: Tensor, sizes: dict[int, int]) -> Tensor:
        """`tensor` with the axes made of these atoms."""
        for old, first, second, size in self.splits:
            sizes.update({first: sizes[old] // size, second: size})
        return tensor.reshape([prod(sizes[atom] for atom in axis) for axis in self.axes])


@dataclass(frozen=True)
class Push:
    """Replay of a path on a tensor laid out like the producer's output, with any sizes; it can be pickled."""

    start: tuple[int, ...]
    steps: tuple[Step, ...] = ()

    def __call__(self, tensor: Tensor) -> Tensor:
        """`tensor` in the layout at the end of the path."""
        sizes = dict(zip(self.start, tensor.shape, strict=True))
        for step in self.steps:
            tensor = step(tensor, sizes)
        return tensor


@dataclass(frozen=True)
class Carried:
    """A carrier met on the way, with what grows in it."""

    carrier: Carrier
    slots: tuple[Slot, ...] = ()
    counts: tuple[Count, ...] = ()


@dataclass(frozen=True)
class Flow:
    """What is known of one tensor that carries the width of `group`.

    `used` atoms have been named on this path so far. `padded`: some position holds zeros in the place of the
    neuron. `split`: an axis was split into sizes of the example, so that only rows can be read from here on.
    `samples`: the atom that stands outermost on the first axis.
    """

    group: str
    axes: tuple[Axis, ...]
    push: Push
    used: int
    carried: tuple[Carried, ...] = ()
    padded: bool = False
    split: bool = False
    samples: int = 0

    @classmethod
    def from_output(cls, group: str, shape: torch.Size, axis: int) -> "Flow":
        """The flow of a producer's output, its width on `axis`."""
        others = iter(range(1, len(shape)))
        names = tuple(WIDTH if i == axis % len(shape) else next(others) for i in range(len(shape)))
        axes = tuple((Atom(name, size),) for name, size in zip(names, shape, strict=True))
        return cls(group, axes, Push(names), len(shape), samples=names[0])

    @property
    def axis(self) -> int:
        """The axis that holds the width."""
        return next(i for i, axis in enumerate(self.axes) if any(atom.name == WIDTH for atom in axis))

    @property
    def width(self) -> int:
        """The width on the example."""
        return next(atom.size for atom in self.axes[self.axis] if atom.name == WIDTH)

    @property
    def sides(self) -> tuple[int, int]:
        """Sizes of what stands outside and inside of the width on its axis."""
        axis = self.axes[self.axis]
        at = [atom.name for atom in axis].index(WIDTH)
        return prod(atom.size for atom in axis[:at]), prod(atom.size for atom in axis[at + 1 :])

    def alone(self, axis: int) -> bool:
        """Whether the width is all that stands on `axis`."""
        return axis < len(self.axes) and [atom.name for atom in self.axes[axis]] == [WIDTH]

    def then(self, step: Step, axes: tuple[Axis, ...], used: int = 0, padded: bool = False) -> "Flow":
        """The flow after a step that moves or mixes positions."""
        if self.split:
            raise Refused("mixed over positions after a reshape that splits an axis by fixed sizes")
        return self.reshaped(step, axes, used, padded)

    def reshaped(
        self,
        step: Step,
        axes: tuple[Axis, ...],
        used: int = 0,
        padded: bool = False,
        splits: tuple[tuple[int, int, int, int], ...] = (),
    ) -> "Flow":
        """The flow after a step that keeps every row."""
        samples = self.samples
        for old, first, _, _ in splits:
            samples = first if old == samples else samples
        if not axes or [atom.name for atom in axes[0][:1]] != [samples]:
            raise Refused("moved so that the samples no longer stand on the first axis")
        push = Push(self.push.start, (*self.push.steps, step))
        used, padded, split = max(self.used, used), self.padded or padded, self.split or bool(splits)
        return replace(self, axes=axes, push=push, used=used, padded=padded, split=split, samples=samples)

    def renewed(self, axes: list[int], shape: torch.Size) -> tuple[tuple[Axis, ...], tuple[tuple[int, int], ...]]:
        """New atoms on `axes` of a tensor that now has `shape`, and which atom stands where."""
        pairs = tuple((axis, self.used + i) for i, axis in enumerate(axes))
        fresh = {axis: (Atom(name, shape[axis]),) for axis, name in pairs}
        return tuple(fresh.get(i, axis) for i, axis in enumerate(self.axes)), pairs

    def with_carrier(self, carried: Carried) -> "Flow":
        """The flow behind a carrier."""
        return replace(self, carried=(*self.carried, carried))


@dataclass(frozen=True)
class Call:
    """One call of a torch function on tensors of which at least one, `tensor`, carries a width."""

    function: Callable[..., Any]
    name: str
    tensor: Tensor
    flow: Flow
    out: Any
    module: str
    where: str
    flow_of: Callable[[Tensor], Flow | None]
    owner: Callable[[Tensor], tuple[str, str] | None]

    @property
    def shape(self) -> torch.Size:
        """The shape of the result, which has to be one tensor."""
        if not torch.is_tensor(self.out):
            raise Refused(f"taken apart by {self.name} in {self.where}")
        return self.out.shape

    def not_over_width(self, axes: list[int], doing: str) -> None:
        """Refuse what works over the width's own axis."""
        if self.flow.axis in axes:
            raise Refused(f"{doing} over its neurons by {self.name} in {self.where}")


Rule = Callable[..., Flow]
"""Called as `rule(call, *args, **kwargs)` with the arguments of the traced function; raises `Refused`."""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, mappings and objects, each as often as it stands there."""
    rest, seen = [value], set()
    while rest:
        item = rest.pop()
        if torch.is_tensor(item):
            yield item
        elif isinstance(item, (tuple, list, Mapping)):
            rest.extend(reversed(list(item.values() if isinstance(item, Mapping) else item)))
        elif hasattr(item, "__dict__") and not callable(item) and id(item) not in seen:
            seen.add(id(item))
            rest.extend(reversed(vars(item).values()))


def named(*names: str) -> Iterator[Callable[..., Any]]:
    """Every torch function and tensor method of these names, in place or not."""
    spaces = (torch, torch.Tensor, torch.nn.functional, torch._C._nn, torch.special)
    for space, name, variant in product(spaces, names, ("{}", "{}_")):
        function = getattr(space, variant.format(name), None)
        if callable(function):
            yield function


def table(rule: Rule, *names: str) -> dict[Callable[..., Any], Rule]:
    """One rule for all functions of these names."""
    return dict.fromkeys(named(*names), rule)
