"""Sums: against loops, whatever the mean, the type and the weights; merged and all-reduced as one pass."""

import contextlib
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as multiprocessing
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist

import auxin.statistics
import reference
from auxin.errors import InputError
from auxin.statistics import (
    Sums,
    clamped_samples,
    cross_sum,
    estimation_samples,
    full_precision,
    gram_and_cross,
    gram_sum,
)


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@given(
    m=st.integers(0, 40),
    f=st.integers(0, 9),
    g=st.integers(0, 5),
    shift=st.sampled_from([0.0, 3.0, 100.0]),
    constant=st.booleans(),
    weighted=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_sums_equal_loops(m, f, g, shift, constant, weighted, seed):
    x, y = draw(seed, m, f) + shift, draw(seed + 1, m, g) - shift
    weights = draw(seed + 2, m).abs().round() if weighted else None
    features = reference.with_constant(x) if constant else x
    scale = 1 + m * (1 + shift) ** 2
    expected = reference.outer_sum(features, features, weights)
    torch.testing.assert_close(gram_sum(x, weights, constant), expected, rtol=0, atol=1e-13 * scale)
    expected = reference.outer_sum(features, y, weights)
    torch.testing.assert_close(cross_sum(x, y, weights, constant), expected, rtol=0, atol=1e-13 * scale)


@pytest.mark.parametrize("features", [1, 95, 96, 97, 200, 785])
def test_strips_cover_the_whole_matrix(features):
    x = draw(0, 30, features)
    torch.testing.assert_close(gram_sum(x), x.T @ x, rtol=0, atol=1e-12)


CHUNK = 128


@pytest.mark.parametrize("extra", [-1, 0, 1, CHUNK])
def test_chunks_add_up(extra, monkeypatch):
    monkeypatch.setattr(auxin.statistics, "CHUNK_ENTRIES", 3 * CHUNK)
    x, y = draw(0, CHUNK + extra, 3) + 5, draw(1, CHUNK + extra, 2)
    weights = draw(2, CHUNK + extra).abs()
    torch.testing.assert_close(gram_sum(x, weights), (x * weights[:, None]).T @ x, rtol=1e-12, atol=0)
    torch.testing.assert_close(cross_sum(x, y, weights), (x * weights[:, None]).T @ y, rtol=1e-11, atol=1e-8)


def test_gram_and_cross_together_are_what_they_are_apart(monkeypatch):
    monkeypatch.setattr(auxin.statistics, "CHUNK_ENTRIES", 3 * CHUNK)
    x, y = draw(0, 2 * CHUNK + 5, 3) + 5, draw(1, 2 * CHUNK + 5, 7)
    gram, cross = gram_and_cross(x, y)
    torch.testing.assert_close(gram, x.T @ x, rtol=1e-12, atol=0)
    torch.testing.assert_close(cross, x.T @ y, rtol=1e-11, atol=1e-8)


@pytest.mark.parametrize("mean", [0.0, 1.0, 100.0, 1e3])
@pytest.mark.parametrize("rows", [64, 20_000])
def test_float32_error_is_as_stated_whatever_the_mean(mean, rows):
    x = draw(0, rows, 40, dtype=torch.float32) * torch.logspace(-1, 1, 40) + mean
    y = draw(1, rows, 7, dtype=torch.float32) + mean
    wide, other = x.double(), y.double()
    spread = (wide - wide.mean(dim=0)).norm(dim=0)
    other_spread = (other - other.mean(dim=0)).norm(dim=0)
    sums = gram_sum(x, constant=True)
    float64 = 2e-14 * (wide.norm(dim=0) / spread).square().max()
    assert ((sums[:-1, :-1] - wide.T @ wide).abs() / torch.outer(spread, spread)).max() < 1e-6 + float64
    about_mean = sums[:-1, :-1] - torch.outer(sums[-1, :-1], sums[-1, :-1]) / rows
    centred = wide - wide.mean(dim=0)
    assert ((about_mean - centred.T @ centred).abs() / torch.outer(spread, spread)).max() < 1e-6 + float64
    assert ((cross_sum(x, y) - wide.T @ other).abs() / torch.outer(spread, other_spread)).max() < 1e-6 + 10 * float64


@pytest.mark.parametrize("weighted", [False, True])
def test_a_large_mean_does_not_multiply_the_rounding_of_another_feature(weighted):
    x = draw(0, 64, 2, dtype=torch.float32) * torch.tensor([0.01, 100.0]) + 100
    weights = draw(1, 64, dtype=torch.float32).abs() if weighted else torch.ones(64)
    wide, mass = x.double(), weights.double()
    centred = (wide - (mass @ wide) / mass.sum()) * mass[:, None].sqrt()
    spread = centred.norm(dim=0)
    expected = (wide * mass[:, None]).T @ wide
    error = (gram_sum(x, weights if weighted else None) - expected).abs() / torch.outer(spread, spread)
    assert error.max() < 2e-6


def test_plain_float32_product_does_lose_what_centring_keeps():
    x = draw(0, 2000, 8, dtype=torch.float32) + 100
    wide = x.double()
    centred = wide - wide.mean(dim=0)
    spread = centred.norm(dim=0)
    plain = ((x.T @ x).double() - wide.T @ wide).abs() / torch.outer(spread, spread)
    assert plain.max() > 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_multiplied_in_float32(dtype):
    x = (draw(0, 500, 12) + 3).to(dtype)
    wide = x.double()
    assert gram_sum(x).dtype == torch.float64
    torch.testing.assert_close(gram_sum(x), wide.T @ wide, rtol=1e-6, atol=0)


def test_autocast_does_not_touch_the_products():
    x, y = draw(0, 400, 200, dtype=torch.float32), draw(1, 400, 100, dtype=torch.float32)
    expected = gram_sum(x), cross_sum(x, y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(gram_sum(x), expected[0])
        assert torch.equal(cross_sum(x, y), expected[1])
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_fast_inexact_products_are_off_for_a_while(precision):
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        asked = matmul.fp32_precision, convolution.fp32_precision
        with contextlib.suppress(KeyboardInterrupt), full_precision(torch.device("cpu")):
            assert (matmul.fp32_precision, convolution.fp32_precision) == ("ieee", "ieee")
            raise KeyboardInterrupt
        assert (matmul.fp32_precision, convolution.fp32_precision) == asked
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="TF32 needs an accelerator")
def test_sums_on_an_accelerator_are_as_exact():
    x, y = draw(0, 3000, 200, dtype=torch.float32).cuda() + 100, draw(1, 3000, 100, dtype=torch.float32).cuda()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        found = gram_sum(x), cross_sum(x, y)
    finally:
        torch.set_float32_matmul_precision(before)
    torch.testing.assert_close(found[0], x.double().T @ x.double(), rtol=1e-11, atol=3e-3)
    torch.testing.assert_close(found[1], x.double().T @ y.double(), rtol=1e-11, atol=3e-3)


def test_rows_without_weight_leave_zeros():
    x = draw(0, 6, 3) + 100
    assert torch.equal(gram_sum(x, torch.zeros(6), constant=True), torch.zeros(4, 4, dtype=torch.float64))


def test_unequal_rows_are_refused():
    with pytest.raises(InputError, match="3 rows against 4"):
        cross_sum(draw(0, 3, 2), draw(0, 4, 2))


@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=5), seed=st.integers(0, 10**6))
def test_merged_equals_one_pass(sizes, seed):
    x = draw(seed, sum(sizes), 4) + 10
    merged, whole = Sums(), Sums()
    whole.update(samples=len(x), rows=len(x), s=gram_sum(x), square=float(x.square().sum()))
    for part in x.split(sizes):
        one = Sums()
        one.update(samples=len(part), rows=len(part), s=gram_sum(part), square=float(part.square().sum()))
        merged.merge(one)
    assert merged.counts == whole.counts
    torch.testing.assert_close(merged["s"], whole["s"], rtol=1e-12, atol=0)
    torch.testing.assert_close(merged.mean("square"), whole.mean("square"), rtol=1e-12, atol=0)


def test_update_leaves_the_tensors_that_it_was_given():
    value, sums = torch.ones(2, dtype=torch.float64), Sums()
    sums.update(a=value)
    sums.update(a=value)
    assert torch.equal(value, torch.ones(2, dtype=torch.float64))
    other = Sums()
    other.merge(sums)
    other.update(a=value)
    assert torch.equal(sums["a"], torch.full((2,), 2.0, dtype=torch.float64))
    assert "a" in sums
    assert "b" not in sums


def test_shapes_that_do_not_add_are_refused():
    sums = Sums()
    sums.update(a=torch.zeros(2))
    with pytest.raises(InputError, match=r"'a' has shape \(2,\)"):
        sums.update(a=torch.zeros(3))
    assert torch.equal(sums["a"], torch.zeros(2, dtype=torch.float64))
    with pytest.raises(InputError, match="no samples"):
        sums.mean("a")


def test_all_reduce_alone_does_nothing():
    sums = Sums()
    sums.update(samples=3, a=2.0)
    sums.all_reduce()
    assert (sums.counts, float(sums["a"])) == ({"samples": 3}, 2.0)


def run_rank(rank: int, folder: str) -> None:
    """One of three ranks; the last one saw no batch."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=3)
    x = (draw(7, 30, 4) + 10).tensor_split([12, 30])[rank]
    sums = Sums()
    if len(x):
        sums.update(samples=len(x), s=gram_sum(x))
        sums.update(square=x.square().sum(), **({"only": 2} if rank else {}))
    sums.all_reduce()
    wrong = Sums()
    wrong.update(a=torch.zeros(1 + rank))
    try:
        wrong.all_reduce()
        refused = ""
    except InputError as error:
        refused = str(error)
    torch.save((sums.sums, sums.counts, refused), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_all_reduce_over_ranks_equals_one_pass(tmp_path: Path):
    multiprocessing.spawn(run_rank, args=(str(tmp_path),), nprocs=3)
    x = draw(7, 30, 4) + 10
    for rank in range(3):
        sums, counts, refused = torch.load(tmp_path / f"{rank}.pt")
        assert counts == {"samples": 30, "only": 2}
        torch.testing.assert_close(sums["s"], x.T @ x, rtol=1e-12, atol=0)
        torch.testing.assert_close(sums["square"], x.square().sum(), rtol=1e-12, atol=0)
        assert "'a'" in refused


def test_samples_to_the_letter_and_clamped():
    assert estimation_samples(576, 1024) == pytest.approx(0.001 * 576**2 / 1024 * 2)
    assert estimation_samples(4608, 16, factor=0.01) == pytest.approx(0.01 * 4608**2 / 16 * 2**8)
    assert clamped_samples(576, 1024) == 6  # 0.65 by the rule, 5.6 by ten rows a feature
    assert clamped_samples(4608, 16, available=50_000) == 50_000
    assert clamped_samples(4608, 16) == 339_739
    assert clamped_samples(1, 10**6) == 1
