"""Whitening: a matrix W with W W^T = (S + damping D)^+ for second moments S, whatever their rank, mean and scale."""

from dataclasses import dataclass

import torch
from torch import Tensor

from auxin.errors import NumericalError

PROBES = 4
INVERSE_STEPS = 2
FAINTEST = 1e-60
"""Second moment of the faintest feature that counts: the weight of a fainter one (exp(-100) behind a softplus) would
leave the range of float32."""


@dataclass(frozen=True)
class Frame:
    """Where S lives: an isometry J whose columns are the live features and `unit`.

    `unit` (F,) is the direction that the constant and the features that never vary share, `mean` the live features'
    means along it, `root` the square root of its second moment; `unit` is None without a constant. `scale` is one
    over the live features' standard deviations.
    """

    live: Tensor
    scale: Tensor
    mean: Tensor
    root: Tensor
    unit: Tensor | None

    def down(self, x: Tensor) -> Tensor:
        """The rows of x (F, ...) centred and scaled, and last, where there is a constant, its level."""
        if self.unit is None:
            return x[self.live] * self.scale[:, None]
        level = self.unit @ x
        centred = (x[self.live] - torch.outer(self.mean, level)) * self.scale[:, None]
        return torch.cat([centred, level[None] / self.root])

    def up(self, y: Tensor) -> Tensor:
        """The transpose of `down`."""
        out = y.new_zeros(len(self.live), y.shape[1])
        inner = y[: len(self.scale)] * self.scale[:, None]
        out[self.live] = inner
        return out if self.unit is None else out.addr_(self.unit, y[-1] / self.root - self.mean @ inner)


@dataclass(frozen=True)
class Whitener:
    """A matrix W (F, R) with W W^T = (S + damping D)^+, kept as factors that are cheaper than itself.

    W is `frame.up` of `lower`^-T, or `matrix` where S is singular.
    """

    frame: Frame
    lower: Tensor
    matrix: Tensor | None = None

    def whiten(self, x: Tensor) -> Tensor:
        """W^T x, shapes (F, ...) to (R, ...)."""
        if self.matrix is not None:
            return self.matrix.T @ x
        y = self.frame.down(x)
        count = len(self.lower)
        y[:count] = torch.linalg.solve_triangular(self.lower, y[:count], upper=False)
        return y

    def colour(self, y: Tensor) -> Tensor:
        """W y, shapes (R, ...) to (F, ...)."""
        if self.matrix is not None:
            return self.matrix @ y
        count = len(self.lower)
        return self.frame.up(torch.cat([torch.linalg.solve_triangular(self.lower.T, y[:count], upper=True), y[count:]]))

    @property
    def rank(self) -> int:
        """R, the numerical rank of S."""
        return len(self.lower) + (self.frame.unit is not None) if self.matrix is None else self.matrix.shape[1]


def whitener(s: Tensor, damping: float = 0.0, constant: bool = False, precision: float | None = None) -> Whitener:
    """The whitening of S = E[b0 b0^T] (F, F): centred, scaled to a unit diagonal, and only then damped.

    So shifts of the inputs by 100 and scales of 1e-4 do no harm: they move neither the threshold nor the damping. The
    constant itself is not damped. Eigenvalues of the scaled matrix count as zero below F * `precision` times the
    largest; the default is the rounding of S's type, and sums of float32 products want 1e-7, since their zero
    eigenvalues are noise of that size. Centring leaves more noise, eps times second moment over variance of a feature,
    and each eigenvalue's threshold is raised by what its eigenvector sees of that. A Cholesky factor serves where S
    has full rank, an `eigh` elsewhere.
    """
    if not torch.isfinite(s.sum()):
        raise NumericalError("NaN or infinity in the second moments of a layer's input: check the data and the weights")
    frame, scaled = _correlations(s, constant, damping)
    eps = torch.finfo(s.dtype).eps
    relative = len(s) * max(precision or eps, eps)
    noise = len(s) * eps * s.diagonal()[frame.live] * frame.scale.square()
    bound = scaled.norm()
    # in place: a fresh matrix of this size costs as much in page faults as half the factorisation
    lower, failed = scaled.mT, torch.zeros((), dtype=torch.int32, device=s.device)
    torch.linalg.cholesky_ex(lower, out=(lower, failed))
    if len(lower) == 0 or (not failed and _smallest(lower) > relative * bound + noise.max()):
        return Whitener(frame, lower)
    return Whitener(frame, lower, _pseudo_whitening(*_correlations(s, constant, damping), relative, noise))


def _correlations(s: Tensor, constant: bool, damping: float) -> tuple[Frame, Tensor]:
    """The frame of S, and the damped correlation matrix in it."""
    frame, scaled = _standardised(s, constant)
    scaled.diagonal().fill_(1.0 + damping)
    return frame, scaled


def _standardised(s: Tensor, constant: bool) -> tuple[Frame, Tensor]:
    """The frame of S, and the correlation matrix of the live features in it.

    A feature is dead where its variance is below F * eps times its second moment, which is what rounding leaves of a
    constant, or too faint.
    """
    diagonal = s.diagonal()
    if not constant or s[-1, -1] <= 0:
        live = diagonal > FAINTEST
        frame = Frame(live, diagonal[live].rsqrt(), diagonal[:0], diagonal.new_ones(()), None)
        return frame, (_part(s, live) * frame.scale).mul_(frame.scale[:, None])
    ratio = s[-1] / s[-1, -1]
    variance = diagonal - ratio * s[-1]
    live = variance > (len(s) * torch.finfo(s.dtype).eps * diagonal).clamp(min=FAINTEST)
    live[-1] = False
    shared = torch.where(live, 0.0, ratio)
    stretch = shared.norm()
    frame = Frame(live, variance[live].rsqrt(), ratio[live] / stretch, stretch * s[-1, -1].sqrt(), shared / stretch)
    centred = _part(s, live).addr(frame.mean * frame.root, frame.mean * frame.root, alpha=-1.0)
    return frame, centred.mul_(frame.scale).mul_(frame.scale[:, None])


def _part(s: Tensor, live: Tensor) -> Tensor:
    """The live rows and columns, as a view where they come first."""
    count = int(live.sum())
    return s[:count, :count] if bool(live[:count].all()) else s[live][:, live]


def _smallest(lower: Tensor) -> Tensor:
    """The smallest eigenvalue of L L^T, overestimated slightly, by inverse iteration on a few random vectors."""
    probes = torch.randn(len(lower), PROBES, dtype=lower.dtype, generator=torch.Generator().manual_seed(0))
    probes = probes.to(lower.device)
    for _ in range(INVERSE_STEPS):
        halfway = torch.linalg.solve_triangular(lower, probes / probes.norm(dim=0), upper=False)
        probes = torch.linalg.solve_triangular(lower.T, halfway, upper=True)
    return probes.norm(dim=0).max().reciprocal()


def _pseudo_whitening(frame: Frame, scaled: Tensor, relative: float, noise: Tensor) -> Tensor:
    """W of a singular S, such that W W^T is its Moore-Penrose inverse.

    Congruences (centring, scaling) carry a pseudo-inverse only to some symmetric G with S G S = S. With P the
    orthogonal projector on the range of S, P G P = S^+ S G S S^+ = S^+: so P W is the factor wanted, and P is the
    identity minus the projector on the span of the null vectors, which the congruence carries exactly.
    """
    values, vectors = torch.linalg.eigh(scaled)
    kept = values > relative * values[-1] + noise @ vectors.square()
    extra = int(frame.unit is not None)
    pad = torch.nn.functional.pad
    basis = pad(vectors[:, kept] / values[kept].sqrt(), (0, extra, 0, extra))
    if extra:
        basis[-1, -1] = 1.0
    inverse = frame.up(basis)
    null = frame.up(pad(vectors[:, ~kept], (0, 0, 0, extra)))
    null, _ = torch.linalg.qr(null / null.norm(dim=0))
    return inverse - null @ (null.T @ inverse)


def whitening(s: Tensor, damping: float = 0.0, constant: bool = False, precision: float | None = None) -> Tensor:
    """A matrix W (F, R) with W W^T = (S + damping D)^+; for damping 0 the true Moore-Penrose inverse (prop2).

    >>> w = whitening(torch.tensor([[4.0, 0.0], [0.0, 0.0]], dtype=torch.float64))
    >>> w @ w.T
    tensor([[0.2500, 0.0000],
            [0.0000, 0.0000]], dtype=torch.float64)
    """
    factors = whitener(s, damping, constant, precision)
    return factors.colour(torch.eye(factors.rank, dtype=s.dtype, device=s.device))
