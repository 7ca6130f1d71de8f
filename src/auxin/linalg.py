"""The algebra of "Growing Tiny Networks": one pure function a formula, on moments in float64.

Notation, the paper's: rows `b0` enter the producer, `b1` the consumer, `v` is the desired update at the consumer's
output and `v_perp` what the best update leaves of it. E[.] is a sum over rows divided by the number of samples.
S = E[b0 b0^T] is (F0, F0), N = E[b0 v_perp^T] is (F0, G), one column an entry of the fan-out. Neurons are rows:
fan-in `alpha` (K, F0), fan-out `omega` (K, G).

Options that most functions share. `damping`: S + damping D takes the place of S, D being the diagonal of the centred
S; 0 is the pseudo-inverse. `constant`: the last feature is the constant 1 of a bias. `precision`: the relative error
of the moments, below which nothing counts (see `whitener`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from auxin.errors import InputError, NumericalError
from auxin.statistics import full_precision
from auxin.whitening import Whitener, whitener
from auxin.whitening import whitening as whitening

OVERSAMPLING = 8
RITZ_TOLERANCE = 1e-13
SPACE_SHARE = 4
LEAST_BLOCKS = 6
DEPENDENT = 1e-9


@dataclass(frozen=True)
class Neurons:
    """New neurons: `alpha` (K, F0), `omega` (K, G), and `singular_values`, largest first.

    `new_neurons` gives all R singular values whatever K; `top_neurons` only the K that it looked for.
    """

    alpha: Tensor
    omega: Tensor
    singular_values: Tensor


def centred(s: Tensor) -> Tensor:
    """The second moments about the mean, (F - 1, F - 1), of features whose last one is the constant 1."""
    return s[:-1, :-1] - torch.outer(s[:-1, -1], s[-1, :-1]) / s[-1, -1]


def best_update(
    v_b1: Tensor, b1_b1: Tensor, damping: float = 0.0, constant: bool = False, precision: float | None = None
) -> Tensor:
    """dW* = E[v b1^T] E[b1 b1^T]^+ (prop1), shapes (M, F1), (F1, F1) to (M, F1)."""
    factors = whitener(b1_b1, damping, constant, precision)
    return factors.colour(factors.whiten(v_b1.T)).T


def refit(
    f_f: Tensor, v_f: Tensor, damping: float = 0.0, constant: bool = True, precision: float | None = None
) -> Tensor:
    """omega = argmin E|v - omega phi|^2 over real features phi, shapes (F, F), (G, F) to (G, F).

    With `constant` the last feature is the constant 1, and the last column of omega the intercept. A damping shrinks
    every feature's share alike, whatever its scale, and leaves the intercept alone.
    """
    return best_update(v_f, f_f, damping, constant, precision)


def bottleneck(v_square: Tensor | float, v_b1: Tensor, b1_b1: Tensor, update: Tensor) -> float:
    """Psi = E|v - dW b1|^2 = E|v|^2 - 2 <dW, E[v b1^T]> + <dW E[b1 b1^T], dW> for any dW (eq:mini_NG)."""
    return float(v_square - 2 * (update * v_b1).sum() + (update @ b1_b1 * update).sum())


def new_neurons(
    s: Tensor,
    n: Tensor,
    count: int | None = None,
    damping: float = 0.0,
    constant: bool = False,
    precision: float | None = None,
    energy: float = 0.0,
) -> Neurons:
    """The neurons of Prop. 3.2 (prop2): S^{-1/2} N = sum lambda_k u_k w_k^T, the first `count` of R.

    alpha_k = sqrt(lambda_k) S^{-1/2} u_k, omega_k = sqrt(lambda_k) w_k, alpha's largest entry positive. A singular
    value counts as zero below max(F, G) * `precision` times the largest of itself and sqrt(`energy`): give E|v|^2,
    of which N is what the best update left, so that the rounding of that subtraction is not taken for neurons.
    """
    factors = whitener(s, damping, constant, precision)
    left, values, right = _svd(factors.whiten(n))
    eps = torch.finfo(s.dtype).eps
    largest = max(float(values.max()) if len(values) else 0.0, math.sqrt(energy))
    rank = int((values > max(n.shape) * max(precision or eps, eps) * largest).sum())
    kept = rank if count is None else min(count, rank)
    root = values[:kept].sqrt()
    return _signed(factors.colour(left[:, :kept] * root).T, (right[:kept].T * root).T, values[:rank])


def _svd(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The thin singular value decomposition, NaN and infinity refused by name."""
    if not torch.isfinite(a.sum()):
        raise NumericalError("NaN or infinity in the cross moments of inputs and gradients: check loss and gradients")
    left, values, right = torch.linalg.svd(a, full_matrices=False)
    return left, values, right


def _signed(alpha: Tensor, omega: Tensor, values: Tensor) -> Neurons:
    """Neurons with alpha's largest entry positive: an SVD leaves the common sign open."""
    largest = alpha.gather(1, alpha.abs().argmax(dim=1, keepdim=True)) if alpha.numel() else alpha.new_ones(0, 1)
    sign = torch.where(largest < 0, -1.0, 1.0).to(alpha)
    return Neurons(alpha * sign, omega * sign, values)


def top_neurons(
    s: Tensor,
    n: Tensor,
    count: int,
    damping: float = 0.0,
    constant: bool = False,
    generator: torch.Generator | None = None,
    precision: float | None = None,
) -> Neurons:
    """The first `count` solutions of N N^T alpha = mu S alpha (prop3), by Cholesky and a block Krylov space.

    Scaled so that alpha^T S alpha = 1 and omega = N^T alpha, and with mu = lambda^2: alpha omega^T is then that of
    Prop. 3.2. No more is ever decomposed than a space of some multiples of `count`; where that would be all, the whole
    matrix is. The starting vectors come from `generator` (default: the same ones in every call).
    """
    factors = whitener(s, damping, constant, precision)
    found = _krylov(factors, n, count + OVERSAMPLING, count, generator)
    left, values, _ = _svd(factors.whiten(n)) if found is None else found
    eps = torch.finfo(s.dtype).eps
    kept = min(count, int((values > max(n.shape) * eps * values[:1]).sum()))
    alpha = factors.colour(left[:, :kept])
    return _signed(alpha.T, alpha.T @ n, values[:kept])


def _krylov(
    factors: Whitener, n: Tensor, block: int, count: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The leading singular triplets of A = W^T N from the block Krylov space of A^T A; None where that is no cheaper.

    With the space kept orthonormal, the residual of a Ritz vector is what its last block sends out of the space. A
    space of more than a quarter of the dimensions costs as much as decomposing A.
    """
    limit = min(factors.rank, n.shape[1]) // SPACE_SHARE
    if LEAST_BLOCKS * block > limit:
        return None
    generator = generator or torch.Generator().manual_seed(0)
    start = torch.randn(n.shape[1], block, dtype=n.dtype, device=generator.device, generator=generator)
    space = torch.linalg.qr(start.to(n.device))[0]
    image = factors.whiten(n @ space)
    while space.shape[1] + block <= limit:
        values, vectors = torch.linalg.eigh(image.T @ image)
        onward = n.T @ factors.colour(image[:, -block:])
        fresh, beyond = torch.linalg.qr(_outside(space, onward))
        residual = (beyond @ vectors[-block:, -count:]).norm(dim=0).max()
        if residual <= RITZ_TOLERANCE * values[-1]:
            return _svd(image)
        fresh = torch.linalg.qr(_outside(space, fresh))[0]
        space = torch.cat([space, fresh], dim=1)
        image = torch.cat([image, factors.whiten(n @ fresh)], dim=1)
    return None


def _outside(space: Tensor, x: Tensor) -> Tensor:
    """x minus its part in the span of an orthonormal basis; done twice, which is enough for rounding."""
    x = x - space @ (space.T @ x)
    return x - space @ (space.T @ x)


def gain(s: Tensor, n: Tensor, alpha: Tensor, omega: Tensor) -> float:
    """How far a fixed linear move lowers the bottleneck: 2 <sum alpha omega^T, N> - E|sum omega alpha^T b0|^2.

    For any neurons and any moments, held-out ones included (lemma:linear_quadratic_problem).
    """
    linear = (alpha @ n * omega).sum()
    square = ((alpha @ s @ alpha.T) * (omega @ omega.T)).sum()
    return float(2 * linear - square)


def moved_bottleneck(psi: float, s: Tensor, n: Tensor, alpha: Tensor, omega: Tensor) -> float:
    """E|v_perp - sum omega alpha^T b0|^2 for a fixed linear move (eq:phi_lambdas).

    For Prop. 3.2's neurons it is Psi - sum lambda^2.
    """
    return psi - gain(s, n, alpha, omega)


def gradmax(n: Tensor, count: int, norm: float | None = None, precision: float | None = None) -> tuple[Tensor, Tensor]:
    """The fan-out that maximises |N omega| (eq:GradMax), and the singular values of N, which is made with the raw v.

    Shapes: `n` (F0, G); omega (K, G), orthonormal, or with `norm` its Frobenius norm. Orthonormal rows are GradMax's
    answer; under |Omega|^2 <= c alone every neuron would be the first. Singular values below max(F0, G) * `precision`
    times the largest count as zero.
    """
    _, values, right = _svd(n)
    eps = torch.finfo(n.dtype).eps
    largest = values[:1].sum()
    values = values[values > max(n.shape) * max(precision or eps, eps) * largest]
    omega = right[: min(count, len(values))]
    omega = _signed(omega, omega, values).omega
    return omega if norm is None else omega * (norm / math.sqrt(max(len(omega), 1))), values


def slopes(v_f: Tensor, omega: Tensor) -> Tensor:
    """The rate at which each neuron lowers the loss, <omega_k, E[v phi'_k]> (eq:Loss_Taylor_order_1).

    Shapes: `v_f` = E[v phi'^T] (G, K) with the raw v, `omega` (K, G); the result (K,). phi'_k is sigma'(0) alpha_k b0
    where sigma is smooth at 0, its one-sided directional derivative along alpha_k b0 where it has a kink.
    """
    return (omega.T * v_f).sum(dim=0)


def slope(v_f: Tensor, omega: Tensor) -> float:
    """The rate at which all neurons together lower the loss, <omega, E[v phi'^T]>."""
    return float(slopes(v_f, omega).sum())


def batch_norm_insertion(mean: Tensor, variance: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Weight and bias that make a batch norm with these running statistics the identity: sqrt(var + eps), mean."""
    return (variance + eps).sqrt(), mean


def select_greedy(g: Tensor, weight: Tensor, count: int) -> Tensor:
    """The `count` features of G = E[b1 b1^T] that serve a refitted consumer best, the best first (greedily).

    Each step takes the feature that lowers E|W b1 - W' b1_K|^2 most, W' refitted; with R what G is after regression on
    those taken, that fall is |W R_j|^2 / R_jj, and R loses R_j R_j^T / R_jj, as a pivoted Cholesky. A prefix is the
    selection of fewer. Features of whose second moment those taken explain all but 1e-9 come last, in index order.
    """
    rest = g.clone()
    effect = weight @ g
    open_ = torch.ones(len(g), dtype=torch.bool, device=g.device)
    floor = DEPENDENT * g.diagonal()
    order: list[int] = []
    for _ in range(min(count, len(g))):
        variance = rest.diagonal()
        usable = open_ & (variance > floor)
        if not usable.any():
            break
        fall = torch.where(usable, effect.square().sum(dim=0) / variance.clamp_min(1e-300), -1.0)
        best = int(fall.argmax())
        column = rest[best] / variance[best].sqrt()
        effect -= torch.outer(effect[:, best] / variance[best].sqrt(), column)
        rest -= torch.outer(column, column)
        open_[best] = False
        order.append(best)
    left = open_.nonzero().flatten()[: max(count - len(order), 0)]
    return torch.cat([torch.tensor(order, dtype=torch.long, device=g.device), left])


def restrict(g: Tensor, weight: Tensor, kept: Tensor) -> Tensor:
    """W' = W G[:, K] G[K, K]^+ (M, |K|): the consumer refitted on the features that stay."""
    return best_update(weight @ g[:, kept], g[kept][:, kept])


def convolution_rank(offsets: int, features: int) -> int:
    """r of eq:pseudo_S: the smaller side of what one output pixel reads, (k'k', dim b0)."""
    return min(offsets, features)


def read_counts(
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """w(p): how many (output pixel q, offset o) of a convolution read pixel p, s q + d o - pad = p (eq:pseudo_S).

    Any number of spatial dimensions; the result has shape `size`. Paddings other than zeros, or unequal sides: pad the
    virtual channels first and count on the padded size with padding 0.
    """
    lengths = {len(size), len(kernel), len(stride), len(padding), len(dilation)}
    if len(lengths) > 1:
        raise InputError(
            f"size, kernel, stride, padding and dilation have lengths {sorted(lengths)}; give one number a dimension"
        )
    counts = torch.ones((), dtype=torch.float64)
    for length, k, s, pad, d in zip(size, kernel, stride, padding, dilation, strict=True):
        outputs = max((length + 2 * pad - d * (k - 1) - 1) // s + 1, 0)
        read = (torch.arange(outputs)[:, None] * s + torch.arange(k) * d - pad).flatten()
        line = torch.bincount(read[(read >= 0) & (read < length)], minlength=length)
        counts = counts[..., None] * line
    return counts


def convolution_s(virtual: Tensor, counts: Tensor) -> Tensor:
    """The sum of w(p) b0(p) b0(p)^T over samples and pixels (F0, F0); times r / n it is S of eq:pseudo_S.

    `virtual` (n, F0, *size) holds b0 as channels on the grid that the consumer reads, `counts` (*size) is w.
    """
    rows = virtual.flatten(2)
    return torch.einsum("nfp,ngp->fg", rows * counts.flatten().to(rows), rows)


def convolution_n(
    virtual: Tensor,
    v: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """The sum of b0(p) v_m(q) over the pairs that offset o joins (F0, M * O), columns (m, o) as in a flat weight.

    Divided by n it is N of eq:pseudo_N, and it is the weight gradient of the convolution that reads the `virtual`
    channels (n, F0, *size) and whose output has the gradient `v` (n, M, *size'). Products are made in the channels'
    own type about each channel's mean, whose share is added in float64: the mean times N of a channel of ones.
    """

    def correlate(channels: Tensor, v: Tensor) -> Tensor:
        shape = channels.new_empty(1).expand(v.shape[1], channels.shape[1], *kernel)
        geometry = (list(stride), list(padding), list(dilation), False, [0] * len(kernel), 1)
        backward = torch.ops.aten.convolution_backward
        with full_precision(channels.device):
            gradient: Tensor = backward(v.to(channels), channels, shape, None, *geometry, [False, True, False])[1]
        return gradient.flatten(2).transpose(0, 1).flatten(1).double()

    mean = virtual.mean(dim=(0, *range(2, virtual.dim())))
    about_mean = correlate(virtual - mean.view(-1, *[1] * len(kernel)), v)
    # a channel of ones is the same in every sample, so that v can be summed over them first
    level = correlate(
        torch.ones_like(virtual[:1, :1], dtype=torch.float64), v.sum(dim=0, keepdim=True, dtype=torch.float64)
    )
    return about_mean.addr_(mean.double(), level[0])
