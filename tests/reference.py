"""Slow, obviously right references for the algebra, written from the paper with explicit loops.

Nothing here uses the package. Rows are (m, F); `n` is the number of samples behind them.
"""

import itertools

import torch
from torch import Tensor

Geometry = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Kernel, stride, padding, dilation: one number a spatial dimension each."""


def outer_sum(rows: Tensor, others: Tensor, weights: Tensor | None = None) -> Tensor:
    """The sum of w x y^T, one pair of rows after the other, in float64."""
    total = torch.zeros(rows.shape[1], others.shape[1], dtype=torch.float64)
    for index in range(len(rows)):
        weight = 1.0 if weights is None else float(weights[index])
        total += weight * rows[index].double()[:, None] * others[index].double()[None, :]
    return total


def with_constant(rows: Tensor) -> Tensor:
    """Every row with a 1 at its end."""
    return torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)


def pseudo_inverse(s: Tensor) -> Tensor:
    """The Moore-Penrose inverse from the eigenvalues, the inverse of 0 being 0."""
    values, vectors = torch.linalg.eigh(s)
    inverse = torch.where(values > 1e-11 * values[-1], 1 / values, torch.zeros_like(values))
    return vectors @ torch.diag(inverse) @ vectors.T


def inverse_root(s: Tensor) -> Tensor:
    """S^{-1/2} of part:expressivity: the symmetric root, the inverse of 0 being 0."""
    values, vectors = torch.linalg.eigh(s)
    inverse = torch.where(values > 1e-11 * values[-1], values.clamp_min(1e-300).rsqrt(), torch.zeros_like(values))
    return vectors @ torch.diag(inverse) @ vectors.T


def best_update(v: Tensor, b1: Tensor) -> Tensor:
    """Prop. prop1 as the least-squares problem eq:dwl itself: the smallest dW that minimises |V - dW B|."""
    return (torch.linalg.pinv(b1, rtol=1e-11) @ v).T


def bottleneck(v: Tensor, b1: Tensor, update: Tensor, n: int) -> float:
    """The mean over samples of |v - dW b1|^2, row by row."""
    return sum(float((v[i] - update @ b1[i]).square().sum()) for i in range(len(v))) / n


def neurons(s: Tensor, n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """alpha (F, R), omega (G, R) and lambda of Prop. prop2, from the symmetric root and a full SVD."""
    root = inverse_root(s)
    left, values, right = torch.linalg.svd(root @ n, full_matrices=False)
    rank = int((values > 1e-9 * values[0]).sum())
    left, values, right = left[:, :rank], values[:rank], right[:rank]
    return root @ left * values.sqrt(), right.T * values.sqrt(), values


def singular_values(b0: Tensor, v: Tensor, n: int) -> Tensor:
    """lambda from the rows themselves: |projection of V on the span of the inputs|, no moment formed.

    The rows end with a 1; their other columns are centred and scaled first, which leaves the span as it is.
    """
    varying = b0[:, :-1] - b0[:, :-1].mean(dim=0)
    varying = varying / varying.square().mean(dim=0).sqrt().clamp_min(1e-300)
    left, values, _ = torch.linalg.svd(torch.cat([varying, b0[:, -1:]], dim=1), full_matrices=False)
    return torch.linalg.svdvals(left[:, values > 1e-9 * values[0]].T @ v) / n**0.5


def moved(v: Tensor, b0: Tensor, alpha: Tensor, omega: Tensor, n: int) -> float:
    """The mean of |v - sum_k omega_k (alpha_k . b0)|^2 for fan-ins alpha (K, F) and fan-outs omega (K, G)."""
    total = 0.0
    for i in range(len(v)):
        move = sum(omega[k] * (alpha[k] @ b0[i]) for k in range(len(alpha)))
        total += float((v[i] - move).square().sum())
    return total / n


def greedy(b1: Tensor, weight: Tensor, count: int) -> list[int]:
    """Forward selection by trying every feature, the consumer refitted by least squares on the rows."""
    target = b1 @ weight.T
    chosen: list[int] = []
    for _ in range(count):
        losses = {}
        for j in set(range(b1.shape[1])) - set(chosen):
            part = b1[:, [*chosen, j]]
            losses[j] = float((target - part @ torch.linalg.pinv(part, rtol=1e-11) @ target).square().sum())
        chosen.append(min(sorted(losses), key=losses.__getitem__))
    return chosen


def output_size(size: tuple[int, ...], geometry: Geometry) -> tuple[int, ...]:
    """The grid of a convolution's output."""
    return tuple(
        (length + 2 * p - d * (k - 1) - 1) // s + 1 for length, k, s, p, d in zip(size, *geometry, strict=True)
    )


def unfold(image: Tensor, geometry: Geometry) -> Tensor:
    """B^t: (n, outputs, offsets, channels), zeros where an offset falls outside the image (n, channels, *size)."""
    kernel, stride, padding, dilation = geometry
    size = tuple(image.shape[2:])
    outputs = list(itertools.product(*map(range, output_size(size, geometry))))
    offsets = list(itertools.product(*map(range, kernel)))
    result = image.new_zeros(len(image), len(outputs), len(offsets), image.shape[1])
    for (i, q), (j, o) in itertools.product(enumerate(outputs), enumerate(offsets)):
        pixel = [s * a + d * b - p for a, b, s, d, p in zip(q, o, stride, dilation, padding, strict=True)]
        if all(0 <= p < length for p, length in zip(pixel, size, strict=True)):
            result[:, i, j] = image[(slice(None), slice(None), *pixel)]
    return result


def virtual_channels(image: Tensor, geometry: Geometry, bias: bool) -> Tensor:
    """b0 of every pixel of a convolution's output as channels (n, F0, *grid): its patch, and 1 where it has a bias."""
    patches = unfold(image, geometry).transpose(2, 3).flatten(2)
    if bias:
        patches = torch.cat([patches, patches.new_ones(*patches.shape[:2], 1)], dim=2)
    grid = output_size(tuple(image.shape[2:]), geometry)
    return patches.transpose(1, 2).unflatten(2, grid)


def pseudo_moments(virtual: Tensor, v: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """S and N of eq:pseudo_S, eq:pseudo_N by unfolding the unfolded input, sample by sample and pixel by pixel."""
    read = unfold(virtual, geometry)
    desired = v.flatten(2)
    n, outputs, offsets, features = read.shape
    s = torch.zeros(features, features, dtype=torch.float64)
    parts = [torch.zeros(features, offsets, dtype=torch.float64) for _ in range(v.shape[1])]
    for i, j in itertools.product(range(n), range(outputs)):
        s += read[i, j].T @ read[i, j]
        for m, part in enumerate(parts):
            part += desired[i, m, j] * read[i, j].T
    return s * min(offsets, features) / n, torch.cat(parts, dim=1) / n


def convolution_moved(virtual: Tensor, v: Tensor, geometry: Geometry, alpha: Tensor, omega: Tensor) -> float:
    """The mean over samples of |v - Conv_omega(Conv_alpha)|^2, omega (K, M * offsets)."""
    read = unfold(virtual, geometry)
    weights = omega.unflatten(1, (v.shape[1], -1))
    response = torch.einsum("iqof,kf,kmo->imq", read, alpha, weights)
    return float((v.flatten(2) - response).square().sum()) / len(v)
