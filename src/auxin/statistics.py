"""Sums and counts that update, merge and all-reduce, and how many samples they need.

Rows are (m, F): one row a sample, token or pixel, one column a feature. Everything is kept as a float64 sum over
rows, never as a mean, so that parts merge exactly.

Precision. Products are made in the precision of the rows (float32 for the half types) on chunks of rows that are
centred by their own mean; the rank-one part of the mean is added in float64. For float32 rows the error of entry
(i, j) is then below 1e-6 of the product of the two features' root sums of squares *about their means* (at most 5e-7
was seen), whatever the mean: inputs with a mean of 100 lose nothing.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

from auxin.errors import InputError

CHUNK_ENTRIES = 2**20
"""Entries of the largest centred copy: larger ones are fresh memory each time, which costs more than the copy."""
SUMMED_ENTRIES = 2**16
"""Entries that are turned to float64 at a time where rows are added up."""
STRIPS = 6
LEAST_STRIP = 96


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Products of float32 matrices and convolutions in float32, whatever the user asked for elsewhere.

    Autocast, `torch.set_float32_matmul_precision` and cuDNN's permission to use TF32 for convolutions may round the
    operands to 8 or 11 bits, and whitening blows that up (TF32 on an H200: 170 times the error of a Gram matrix).
    """
    backends: Any = torch.backends
    switches = (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv)
    saved = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for switch, value in zip(switches, saved, strict=True):
            switch.fp32_precision = value


def gram_sum(rows: Tensor, weights: Tensor | None = None, constant: bool = False) -> Tensor:
    """The sum of w x x^T over rows x, in float64.

    Shapes: `rows` (m, F), `weights` (m,); the result (F, F), or (F + 1, F + 1) with `constant`, as if every row
    ended with a 1.

    >>> gram_sum(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), constant=True)
    tensor([[10., 14.,  4.],
            [14., 20.,  6.],
            [ 4.,  6.,  2.]], dtype=torch.float64)
    """
    total = _zeros(rows, rows.shape[1] + constant, rows.shape[1] + constant)
    with full_precision(rows.device):
        for chunk in _chunks(rows, weights, chunk_rows(rows)):
            _add_gram(total, chunk, constant)
    return _mirrored(total, rows.shape[1])


def cross_sum(rows: Tensor, others: Tensor, weights: Tensor | None = None, constant: bool = False) -> Tensor:
    """The sum of w x y^T over pairs of rows x and y, in float64.

    Shapes: `rows` (m, F), `others` (m, G), `weights` (m,); the result (F, G), or (F + 1, G) with `constant`, as if
    every row of `rows` ended with a 1.
    """
    if len(rows) != len(others):
        raise InputError(f"{len(rows)} rows against {len(others)}: the sum of x y^T pairs them, give as many of each")
    total, step = _zeros(rows, rows.shape[1] + constant, others.shape[1]), chunk_rows(rows, others)
    with full_precision(rows.device):
        for x, y in zip(_chunks(rows, weights, step), _chunks(others, weights, step), strict=True):
            _add_cross(total, x, y, constant)
    return total


def gram_and_cross(rows: Tensor, others: Tensor, constant: bool = False) -> tuple[Tensor, Tensor]:
    """`gram_sum(rows, constant=...)` and `cross_sum(rows, others, constant=...)`, the rows centred once for both."""
    features = rows.shape[1] + constant
    gram, cross = _zeros(rows, features, features), _zeros(rows, features, others.shape[1])
    step = chunk_rows(rows, others)
    with full_precision(rows.device):
        for x, y in zip(_chunks(rows, None, step), _chunks(others, None, step), strict=True):
            _add_gram(gram, x, constant)
            _add_cross(cross, x, y, constant)
    return _mirrored(gram, rows.shape[1]), cross


def _add_gram(total: Tensor, chunk: "_Chunk", constant: bool) -> None:
    """Add a chunk's part of a Gram matrix, its strips right of the diagonal alone."""
    features = len(chunk.centred)
    for start, stop in _strips(features):
        total[start:stop, start:features] += _product(chunk.centred[start:stop], chunk.weighted[start:])
    centre, shift = chunk.level(constant)
    half = shift + centre * (chunk.weight / 2)
    total.addmm_(torch.stack([centre, half], dim=1), torch.stack([half, centre]))


def _add_cross(total: Tensor, x: "_Chunk", y: "_Chunk", constant: bool) -> None:
    """Add a chunk's part of a cross moment."""
    total[: len(x.centred)] += _product(y.centred, x.weighted).T
    centre, shift = x.level(constant)
    both = torch.stack([y.shift + y.centre * x.weight, y.centre])
    total.addmm_(torch.stack([centre, shift], dim=1), both)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """x y^T for contiguous (F, m) and (G, m).

    For float32 on a CPU by oneDNN, which is twice as fast as the BLAS behind `@` on processors that the BLAS was not
    made for (AMD and MKL), and as precise.
    """
    if x.is_cpu and x.dtype == torch.float32 and x.numel() and y.numel() and torch.backends.mkldnn.is_available():
        return linear(x.to_mkldnn(), y).to_dense()
    return x @ y.T


def _mirrored(total: Tensor, features: int) -> Tensor:
    """A Gram matrix with what is left of the diagonal filled in."""
    for start, stop in _strips(features):
        total[stop:, start:stop] = total[start:stop, stop:].T
    return total


@dataclass(frozen=True)
class _Chunk:
    """Some rows about a centre, times their weights, and in float64 the centre, the rows' sum about it, their weight.

    `centred` and `weighted` are (F, m), a feature's values side by side as products want them.

    Any centre gives the same sums: it is only there to make the products small. `shift` comes from the rows as they
    were given: a sum of centred rows would bring their rounding in, times the mean of every other feature.
    """

    centred: Tensor
    weighted: Tensor
    centre: Tensor
    shift: Tensor
    weight: Tensor | int

    def level(self, constant: bool) -> tuple[Tensor, Tensor]:
        """Centre and sum, with those of a constant 1 at the end."""
        if not constant:
            return self.centre, self.shift
        return torch.cat([self.centre, self.centre.new_ones(1)]), torch.cat([self.shift, self.shift.new_zeros(1)])


def chunk_rows(*tensors: Tensor) -> int:
    """How many rows of the widest of some tensors make a chunk."""
    return max(64, CHUNK_ENTRIES // max(1, *(tensor.shape[1] for tensor in tensors)))


def _chunks(rows: Tensor, weights: Tensor | None, step: int) -> Iterator[_Chunk]:
    """The rows a chunk at a time, in the precision of their products."""
    work = torch.promote_types(rows.dtype, torch.float32)
    for start in range(0, len(rows), step):
        part = rows[start : start + step].detach().to(work)
        if weights is None:
            centre = part.mean(dim=0)
            centred, wide = _centred(part, centre), centre.double()
            yield _Chunk(centred, centred, wide, _column_sums(part) - wide * len(part), len(part))
            continue
        weight = weights[start : start + step].detach().to(part)
        total = weight.sum()
        centre = torch.where(total > 0, weight @ part / total, 0.0)
        centred, wide = _centred(part, centre), centre.double()
        mass = weight.sum(dtype=torch.float64)
        shift = _column_sums(part, weight) - wide * mass
        yield _Chunk(centred, centred * weight, wide, shift, mass)


def _centred(part: Tensor, centre: Tensor) -> Tensor:
    """Rows (m, F) less a centre (F,), as a contiguous (F, m)."""
    return torch.sub(part.T, centre[:, None], out=part.new_empty(part.shape[1], len(part)))


def _column_sums(part: Tensor, weight: Tensor | None = None) -> Tensor:
    """The (weighted) sum of rows in float64, made of few at a time: torch copies what it adds up in another type."""
    total, step = _zeros(part, part.shape[1]), max(1, SUMMED_ENTRIES // max(1, part.shape[1]))
    for start in range(0, len(part), step):
        rows = part[start : start + step]
        if weight is None:
            total += rows.sum(dim=0, dtype=torch.float64)
        else:
            total += weight[start : start + step].double() @ rows.double()
    return total


def _zeros(like: Tensor, *shape: int) -> Tensor:
    """A float64 matrix of zeros on the device of `like`."""
    return torch.zeros(*shape, dtype=torch.float64, device=like.device)


def _strips(features: int) -> list[tuple[int, int]]:
    """Where the strips of rows start and stop of which a symmetric product computes only what is right of the diagonal.

    With six strips 7/12 of the multiplications are left; narrower strips make slower products.
    """
    strip = max(LEAST_STRIP, 16 * math.ceil(features / STRIPS / 16))
    return [(start, min(start + strip, features)) for start in range(0, features, strip)]


@dataclass
class Sums:
    """Named float64 sums and integer counts: what passes over the data leave behind.

    >>> sums = Sums()
    >>> sums.update(samples=4, loss=2.0)
    >>> sums.update(samples=4, loss=4.0)
    >>> float(sums.mean("loss"))
    0.75
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    _borrowed: set[str] = field(default_factory=set, repr=False, compare=False)

    def update(self, **values: Tensor | float) -> None:
        """Add to the sums; an int adds to the count of its name. No tensor given is ever written to."""
        self._update(values, own=False)

    def take(self, **values: Tensor | float) -> None:
        """As `update`, and float64 tensors given become ours, to be written to without a copy."""
        self._update(values, own=True)

    def _update(self, values: dict[str, Any], own: bool) -> None:
        for name, value in values.items():
            if isinstance(value, int):
                self.counts[name] = self.counts.get(name, 0) + value
            else:
                self._add(name, torch.as_tensor(value, dtype=torch.float64).detach(), own)

    def merge(self, other: "Sums") -> None:
        """Add what another pass (other batches, another fold) collected."""
        self.update(**other.sums, **other.counts)

    def mean(self, name: str) -> Tensor:
        """A sum divided by the number of samples (not of rows), as the paper's E[.]."""
        if not self.counts.get("samples"):
            raise InputError("a mean over no samples: update with samples=... before asking for one")
        return self.sums[name] / self.counts["samples"]

    def give_means(self) -> dict[str, Tensor]:
        """All means, made in place of the sums and given away: nothing is left here."""
        samples = self.counts["samples"]
        given = {
            name: value / samples if name in self._borrowed else value.div_(samples)
            for name, value in self.sums.items()
        }
        self.sums, self.counts = {}, {}
        self._borrowed.clear()
        return given

    def __getitem__(self, name: str) -> Tensor:
        return self.sums[name]

    def __contains__(self, name: object) -> bool:
        return name in self.sums

    def _add(self, name: str, value: Tensor, own: bool) -> None:
        present = self.sums.get(name)
        if present is None:
            self.sums[name] = value
            self._borrowed |= set() if own else {name}
        elif present.shape != value.shape:
            raise InputError(f"sum {name!r} has shape {tuple(present.shape)}, and {tuple(value.shape)} was added to it")
        elif name in self._borrowed:
            self.sums[name] = present + value
            self._borrowed.discard(name)
        else:
            present += value

    def all_reduce(self, group: "dist.ProcessGroup | None" = None) -> None:
        """Add up the sums of all ranks, in one message; does nothing where torch.distributed is not in use.

        A rank that saw no batch takes part with zeros.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return
        shapes, counts = _layout(self, group)
        device = torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")
        own = next(iter(self.sums.values()), torch.empty(0, device=device)).device
        parts = [self.sums.get(name, torch.zeros(shape)).reshape(-1).to(device) for name, shape in shapes.items()]
        tail = torch.tensor([self.counts.get(name, 0) for name in counts], dtype=torch.float64, device=device)
        flat = torch.cat([*(part.double() for part in parts), tail])
        dist.all_reduce(flat, group=group)
        pieces = torch.split(flat, [*(math.prod(shape) for shape in shapes.values()), len(counts)])
        self.sums = {n: piece.reshape(s).to(own) for (n, s), piece in zip(shapes.items(), pieces, strict=False)}
        self._borrowed.clear()
        self.counts = {name: int(value) for name, value in zip(counts, pieces[-1].tolist(), strict=True)}


def _layout(sums: Sums, group: "dist.ProcessGroup | None") -> tuple[dict[str, torch.Size], list[str]]:
    """The shapes of all sums and the names of all counts that any rank holds, in one order."""
    own = ({name: value.shape for name, value in sums.sums.items()}, list(sums.counts))
    ranks: list[tuple[dict[str, torch.Size], list[str]]] = [own] * dist.get_world_size(group)
    dist.all_gather_object(ranks, own, group=group)
    shapes: dict[str, torch.Size] = {}
    for held, _ in ranks:
        for name, shape in held.items():
            if shapes.setdefault(name, shape) != shape:
                raise InputError(
                    f"ranks hold sum {name!r} in shapes {tuple(shapes[name])} and {tuple(shape)}: "
                    "every rank must measure the same model; grow all ranks alike"
                )
    return dict(sorted(shapes.items())), sorted({name for _, names in ranks for name in names})


def estimation_samples(features: int, positions: int, image_positions: int = 1024, factor: float = 0.001) -> float:
    """The number of samples that the paper's rule asks for, to the letter (sec:BatchsizeForEstimation).

    n = factor * (SW)^2 / P * 2^k with k = sqrt(image_positions / P): `features` is SW (kernel area times channels),
    `positions` is P, the pixels that one sample brings; the paper's images have 32 * 32.

    >>> round(estimation_samples(9 * 64, 32 * 32), 2), round(estimation_samples(9 * 512, 4 * 4))
    (0.65, 339739)
    """
    return factor * features**2 / positions * math.pow(2.0, math.sqrt(image_positions / positions))


def clamped_samples(
    features: int,
    positions: int,
    available: int | None = None,
    multiple: float = 10.0,
    rule: Callable[[int, int], float] = estimation_samples,
) -> int:
    """The paper's number of samples, clamped between what a regression needs and what there is.

    At least `multiple` rows a feature (a sample brings `positions` rows), so that an estimate's variance stays below
    a `multiple`-th of the noise; at most the `available` samples of the data set.
    """
    least = multiple * features / positions
    wanted = math.ceil(max(rule(features, positions), least, 1.0))
    return wanted if available is None else min(wanted, available)
