"""Running the user's model on the user's batches, and keeping what the mathematics needs of it.

Batches are drawn once and kept; what a pass over them needs (each layer's input, and v at each consumer) is cached
up to a limit and made again beyond it, with the same random numbers. Two folds of samples never mix: the estimate
is made on one, everything that is chosen is chosen on the other.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from auxin.errors import AuxinError, InputError, NoSiteError, NumericalError
from auxin.isolation import reseed
from auxin.layers import rule_for
from auxin.layers.base import computing
from auxin.objectives import Task, tensors_in
from auxin.structure import Site

Fold = Literal["estimate", "held_out"]
CACHE_BYTES = 2**30


@dataclass
class Kept:
    """One batch, its random seed, and the rows of each fold: None for all, absent for none."""

    batch: Any
    size: int
    seed: int
    rows: dict[Fold, Tensor | None] = field(default_factory=dict)

    def count(self, fold: Fold) -> int:
        """Samples of this batch in a fold."""
        rows = self.rows.get(fold)
        return self.size if rows is None and fold in self.rows else 0 if rows is None else len(rows)


@dataclass(frozen=True)
class Pass:
    """What one forward and backward pass left: layer inputs, and v = -n dL/da at consumers, by module name."""

    inputs: dict[str, Tensor]
    v: dict[str, Tensor]
    spread: dict[str, Tensor]
    """Rows, and sum and sum of squares of each output of a consumer: (3, M)."""
    loss: float

    @property
    def bytes(self) -> int:
        """The memory that caching it takes."""
        unique = {t.data_ptr(): t for t in [*self.inputs.values(), *self.v.values()]}
        return sum(t.numel() * t.element_size() for t in unique.values())


class Measurement:
    """Kept batches of one model, and every pass over them. To be used inside `isolation.isolated`."""

    def __init__(self, model: nn.Module, task: Task, sites: Sequence[Site], kept: list[Kept]) -> None:
        self.model = model
        self.task = task
        self.sites = list(sites)
        self.kept = kept
        self._cache: dict[int, Pass] = {}
        self._room = CACHE_BYTES

    def count(self, fold: Fold) -> int:
        """Samples in a fold."""
        return sum(kept.count(fold) for kept in self.kept)

    def passes(self) -> Iterator[tuple[Kept, Pass]]:
        """Every kept batch with its forward and backward pass, made again where it was too large to keep."""
        for index, kept in enumerate(self.kept):
            found = self._cache.get(index)
            if found is None:
                found = forward_backward(self.model, self.task, self.sites, kept)
                if found.bytes <= self._room:
                    self._cache[index] = found
                    self._room -= found.bytes
            yield kept, found

    def parts(self, folds: Sequence[Fold]) -> Iterator[tuple[Fold, "Part"]]:
        """The passes cut down to the rows of each fold."""
        for kept, found in self.passes():
            for fold in folds:
                if kept.count(fold):
                    yield fold, Part(kept, found, kept.rows[fold])

    @torch.no_grad()
    def loss(self, model: nn.Module, fold: Fold, limit: int | None = None) -> float:
        """Mean loss of a model over a fold: whole batches run, the fold's rows averaged.

        With a limit, batches beyond that many samples of the fold are left out.
        """
        total, samples = 0.0, 0
        for kept in self.kept:
            count = kept.count(fold)
            if count == 0 or (limit is not None and samples >= limit):
                continue
            reseed(kept.seed)
            answer = self.task.run(model, kept.batch)
            total += float(self.task.mean(answer, kept.batch, kept.rows[fold])) * count
            samples += count
        return total / samples

    @torch.no_grad()
    def answers(self, model: nn.Module, fold: Fold) -> list[tuple[Any, Any, Tensor | None]]:
        """(answer, batch, rows) of every batch with samples in a fold, for scores."""
        found = []
        for kept in self.kept:
            if kept.count(fold):
                reseed(kept.seed)
                found.append((self.task.run(model, kept.batch), kept.batch, kept.rows[fold]))
        return found


@dataclass(frozen=True)
class Part:
    """Some rows of a pass."""

    kept: Kept
    whole: Pass
    rows: Tensor | None

    @property
    def samples(self) -> int:
        """How many samples these rows belong to."""
        return self.kept.size if self.rows is None else len(self.rows)

    def cut(self, tensor: Tensor) -> Tensor:
        """These rows of any tensor of the whole batch."""
        return take(tensor, self.rows, self.kept.size)

    def inputs(self, name: str) -> Tensor:
        """A layer's input."""
        return self.cut(self.whole.inputs[name])

    def v(self, name: str) -> Tensor:
        """The desired update at a consumer's output."""
        return self.cut(self.whole.v[name])


def take(tensor: Tensor, rows: Tensor | None, size: int) -> Tensor:
    """The given samples of a tensor whose first axis is samples, or samples times something."""
    if rows is None:
        return tensor
    if tensor.shape[0] == size:
        return tensor[rows]
    return tensor.unflatten(0, (size, -1))[rows].flatten(0, 1)


class Stream:
    """A user's batches, iterated once, checked as they come."""

    def __init__(self, batches: Iterable[Any], task: Task, model: nn.Module, seed: int) -> None:
        self.task = task
        self.model = model
        self.seed = seed
        self.drawn = 0
        self._batches = iterated(batches)

    def first(self) -> Kept:
        """The first batch, or the error that there is none."""
        found = self._take()
        if found is None:
            raise InputError(
                "no batches were given; accepted: an iterable with at least one (input, target) batch (a generator "
                "gives its batches once: pass a list or a loader)"
            )
        return found

    def more(self, kept: list[Kept], wanted: int | None) -> None:
        """Whole batches until `kept` holds the samples wanted, or to the end."""
        while wanted is None or sum(batch.size for batch in kept) < wanted:
            found = self._take()
            if found is None:
                return
            kept.append(found)

    def _take(self) -> Kept | None:
        batch = next(self._batches, _END)
        if batch is _END:
            return None
        check_batch(self.model, self.task, batch, self.drawn)
        self.drawn += 1
        return Kept(batch, self.task.size(batch), self.seed + self.drawn)


_END = object()


def iterated(batches: Any) -> Iterator[Any]:
    """An iterator over batches, or the error that says what is accepted."""
    if torch.is_tensor(batches) or not isinstance(batches, Iterable):
        raise InputError(
            f"batches is a {type(batches).__name__}; accepted: an iterable of (input, target) batches, "
            "such as a DataLoader or a list [(input, target)]"
        )
    return iter(batches)


def check_batch(model: nn.Module, task: Task, batch: Any, index: int) -> None:
    """Refuse NaN, infinity, emptiness and a foreign device in a batch's inputs."""
    if task.size(batch) == 0:
        raise InputError(f"batch {index} holds no sample; leave empty batches out")
    parameter = next(model.parameters(), None)
    if parameter is None:
        raise NoSiteError(f"{type(model).__name__} has no parameters, and growth needs a hidden Linear or Conv layer")
    for tensor in tensors_in(task.inputs(batch)):
        if tensor.device != parameter.device:
            raise InputError(f"the model is on {parameter.device}, batch {index} on {tensor.device}; move one of them")
    if parameter.is_meta:
        raise InputError("the model is on the meta device, without values; give it some with model.to_empty(...)")
    for tensor in tensors_in(batch):
        if tensor.is_floating_point() and not tensor.is_meta and not bool(torch.isfinite(tensor).all()):
            raise NumericalError(f"batch {index} holds NaN or infinity; clean the data before growing on it")


def split_folds(measurement: Measurement, generator: torch.Generator) -> str | None:
    """Cut every batch's rows in two random halves; where that cannot be, whole batches alternate.

    Returns a note where nothing could be held out: the folds are then the same samples.
    """
    for index, (kept, found) in enumerate(measurement.passes()):
        if kept.size > 1 and splits(measurement, kept, found):
            order = torch.randperm(kept.size, generator=generator)
            half = (kept.size + 1) // 2
            kept.rows = {"estimate": order[:half].sort().values, "held_out": order[half:].sort().values}
        else:
            kept.rows = {"held_out" if index % 2 else "estimate": None}
    if measurement.count("held_out"):
        return None
    for kept in measurement.kept:
        kept.rows["held_out"] = None
    return "nothing could be held out (a single sample or batch): choices were made on the samples of the estimate"


def splits(measurement: Measurement, kept: Kept, found: Pass) -> bool:
    """Whether a batch's rows can go to two folds."""
    tensors = [*found.inputs.values(), *found.v.values()]
    if any(tensor.shape[0] % kept.size for tensor in tensors):
        return False
    with torch.no_grad():
        reseed(kept.seed)
        return measurement.task.splits(measurement.task.run(measurement.model, kept.batch), kept.batch)


def one_fold(kept: list[Kept], fold: Fold = "estimate") -> list[Kept]:
    """Every sample enters the estimate (or the fold named)."""
    for batch in kept:
        batch.rows = {fold: None}
    return kept


def with_held_out(measurement: Measurement, batches: Iterable[Any]) -> None:
    """The batches drawn so far make the estimate, these ones the choices."""
    one_fold(measurement.kept)
    stream = Stream(batches, measurement.task, measurement.model, measurement.kept[-1].seed + 1)
    kept = [stream.first()]
    stream.more(kept, None)
    measurement.kept.extend(one_fold(kept, "held_out"))


@torch.enable_grad()
def forward_backward(model: nn.Module, task: Task, sites: Sequence[Site], kept: Kept) -> Pass:
    """One pass of a batch, its gradients taken without touching `.grad`."""
    tape = Tape()
    producers = {name for site in sites for name in site.producers}
    consumers = {name for site in sites for name in site.consumers}
    reseed(kept.seed)
    with tape.recording(model, producers | consumers, consumers):
        loss = task.mean(task.run(model, kept.batch), kept.batch)
    check_loss(loss)
    tape.check_inputs()
    gradients = torch.autograd.grad(loss, list(tape.edges.values()), allow_unused=True)
    if tape.edges and all(gradient is None for gradient in gradients):
        raise InputError("the loss has no gradient at any layer that could grow: it does not depend on the model")
    v = {}
    for name, gradient in zip(tape.edges, gradients, strict=True):
        found = torch.zeros(tape.shapes[name], device=loss.device) if gradient is None else gradient
        if not bool(torch.isfinite(found).all()):
            raise NumericalError(f"the gradient at the output of {name!r} holds NaN or infinity; nothing was changed")
        v[name] = computing(found) * -kept.size
    return Pass({name: x for name, (x, _) in tape.inputs.items()}, v, tape.spread, float(loss.detach()))


def check_loss(loss: Any) -> None:
    """A loss is a finite scalar tensor with a gradient."""
    if not torch.is_tensor(loss) or loss.dim() or loss.is_complex():
        kind = f"a tensor of shape {tuple(loss.shape)}, {loss.dtype}" if torch.is_tensor(loss) else type(loss).__name__
        raise InputError(
            f"the loss is {kind}; accepted: a real scalar tensor, the mean over the batch (reduction='mean')"
        )
    if not bool(torch.isfinite(loss)):
        raise NumericalError(f"the loss is {loss.item()}; growth needs a finite loss. Nothing was changed")
    if not loss.requires_grad:
        raise InputError(
            "the loss has no gradient: it does not depend on the model's parameters, or was made under no_grad or "
            "detached; return the loss tensor itself"
        )


class Tape:
    """What hooks write down during one forward pass."""

    def __init__(self) -> None:
        self.inputs: dict[str, tuple[Tensor, int]] = {}
        self.edges: dict[str, Any] = {}
        self.shapes: dict[str, torch.Size] = {}
        self.spread: dict[str, Tensor] = {}

    @contextmanager
    def recording(self, model: nn.Module, read: set[str], watched: set[str]) -> Iterator[None]:
        """Hooks on the modules of `read` (their input) and `watched` (their output), gone afterwards."""
        handles = []
        try:
            for name in sorted(read):
                hook = self._before(name)
                handles.append(model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True))
            for name in sorted(watched):
                handles.append(model.get_submodule(name).register_forward_hook(self._after(name)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def check_inputs(self) -> None:
        """Inputs must still hold what the layers read."""
        for name, (value, version) in self.inputs.items():
            if value._version != version:
                raise AuxinError(f"the input of {name!r} is overwritten in place after it was read; use a copy there")

    def _before(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            value = (args[0] if args else kwargs["input"]).detach()
            self.inputs[name] = (value, value._version)

        return hook

    def _after(self, name: str) -> Callable[..., Tensor]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            kept = output if output.requires_grad else output.detach().requires_grad_()
            self.edges[name] = torch.autograd.graph.get_gradient_edge(kept)
            self.shapes[name] = kept.shape
            rows = rule_for(module).output_rows(kept.detach())
            counts = torch.full_like(rows[:1].sum(0), len(rows))
            self.spread[name] = torch.stack([counts, rows.sum(0), rows.square().sum(0)]).double()
            return kept

        return hook
