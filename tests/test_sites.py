"""Which sites small models have, exactly, why the other widths are refused, and that finding changes nothing."""

import copy
import pickle
import random
import re
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auxin.errors import InputError, ModelChangedError, WrapperError
from auxin.sites import find_sites, verify
from auxin.structure import Slot
from helpers_sites import Fn, seen_by, wider

VECTORS, TOKENS, IMAGES = (4, 8), (4, 5, 8), (4, 3, 12, 12)


def batch(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pair(function: Callable[..., Tensor], hidden: int = 6, **parts: object) -> Fn:
    """Linear layers a (8 to hidden) and b (hidden to 3)."""
    return Fn(function, a=nn.Linear(8, hidden), b=nn.Linear(hidden, 3), **parts)


def convolutions(*between: nn.Module, channels: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), *between, nn.Conv2d(channels, 4, 3), nn.Flatten())


def to_linear(*between: nn.Module, inner: int, channels: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, channels, 3), *between, nn.Linear(channels * inner, 2))


class Residual(nn.Module):
    """A block with a private width beside a stream."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5)
        self.conv2, self.norm2 = nn.Conv2d(5, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


# Models with the example's shape and, for every site: name, consumers, (outer, inner), kinds of carriers, padded.
OFFERED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[tuple[object, ...]]]] = {
    "relu": (lambda: pair(lambda s, x: s.b(F.relu(s.a(x)))), VECTORS, [("a", ["b"], (1, 1), [], False)]),
    "identity": (lambda: pair(lambda s, x: s.b(s.a(x))), VECTORS, [("a", ["b"], (1, 1), [], False)]),
    "hand-made swish": (
        lambda: pair(lambda s, x: (lambda h: s.b(h * torch.sigmoid(1.7 * h)))(s.a(x))),
        VECTORS,
        [("a", ["b"], (1, 1), [], False)],
    ),
    "in place": (
        lambda: pair(lambda s, x: s.b(s.a(x).relu_().mul_(2).add_(1))),
        VECTORS,
        [("a", ["b"], (1, 1), [], False)],
    ),
    "two heads": (
        lambda: pair(lambda s, x: (lambda h: (s.b(h), s.c(h)))(F.gelu(s.a(x))), c=nn.Linear(6, 1)),
        VECTORS,
        [("a", ["b", "c"], (1, 1), [], False)],
    ),
    "drop path": (
        lambda: pair(lambda s, x: (lambda h: s.b(h * h.new_empty(h.shape[0], 1).bernoulli_(0.5)))(s.a(x))),
        VECTORS,
        [("a", ["b"], (1, 1), [], False)],
    ),
    "learnable gain": (
        lambda: pair(lambda s, x: s.b(s.a(x) * s.gain), gain=nn.Parameter(torch.zeros(1))),
        VECTORS,
        [("a", ["b"], (1, 1), [], False)],
    ),
    "width 0": (lambda: pair(lambda s, x: s.b(F.relu(s.a(x))), hidden=0), VECTORS, [("a", ["b"], (1, 1), [], False)]),
    "width 1": (lambda: pair(lambda s, x: s.b(F.relu(s.a(x))), hidden=1), VECTORS, [("a", ["b"], (1, 1), [], False)]),
    "tokens": (
        lambda: pair(lambda s, x: s.b(F.gelu(s.a(x)))[:, 0]),
        TOKENS,
        [("a", ["b"], (1, 1), [], False)],
    ),
    "merged tokens": (
        lambda: pair(lambda s, x: s.b(F.gelu(s.a(x.view(-1, 8))).view(x.shape[0], -1, s.a.out_features))),
        TOKENS,
        [("a", ["b"], (1, 1), [], False)],
    ),
    "token mixing": (
        lambda: Fn(
            lambda s, x: s.b(F.gelu(s.a(x.transpose(1, 2)))).transpose(1, 2), a=nn.Linear(5, 6), b=nn.Linear(6, 5)
        ),
        TOKENS,
        [("a", ["b"], (1, 1), [], False)],
    ),
    "layer norm beside the width": (
        lambda: pair(lambda s, x: s.b(s.norm(s.a(x).transpose(1, 2)).transpose(1, 2)), norm=nn.LayerNorm(5)),
        TOKENS,
        [("a", ["b"], (1, 1), ["normaliser"], False)],
    ),
    "batch norm and pooling": (
        lambda: convolutions(nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)),
        IMAGES,
        [("0", ["4"], (1, 1), ["batch_norm"], False)],
    ),
    "norm without affine map": (
        lambda: convolutions(nn.BatchNorm2d(6, affine=False), nn.Tanh()),
        IMAGES,
        [("0", ["3"], (1, 1), ["normaliser"], False)],
    ),
    "instance norm": (
        lambda: convolutions(nn.InstanceNorm2d(6, affine=True, track_running_stats=True)),
        IMAGES,
        [("0", ["2"], (1, 1), ["normaliser"], False)],
    ),
    "group norm": (
        lambda: convolutions(nn.GroupNorm(3, 6), nn.ELU()),
        IMAGES,
        [("0", ["3"], (1, 1), ["normaliser"], False)],
    ),
    "slopes": (lambda: convolutions(nn.PReLU(6)), IMAGES, [("0", ["2"], (1, 1), ["elementwise"], False)]),
    "one slope": (lambda: convolutions(nn.PReLU()), IMAGES, [("0", ["2"], (1, 1), [], False)]),
    "padding on the way": (lambda: convolutions(nn.ZeroPad2d(1)), IMAGES, [("0", ["2"], (1, 1), [], True)]),
    "reflection on the way": (lambda: convolutions(nn.ReflectionPad2d(1)), IMAGES, [("0", ["2"], (1, 1), [], False)]),
    "average pooling with padding": (
        lambda: convolutions(nn.AvgPool2d(3, 2, padding=1, ceil_mode=True)),
        IMAGES,
        [("0", ["2"], (1, 1), [], True)],
    ),
    "max pooling with padding": (
        lambda: convolutions(nn.MaxPool2d(3, 2, padding=1)),
        IMAGES,
        [("0", ["2"], (1, 1), [], False)],
    ),
    "consumer with padding": (
        lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 2, 3, padding="same", dilation=2)),
        IMAGES,
        [("0", ["2"], (1, 1), [], True)],
    ),
    "consumer with circular padding": (
        lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 2, 3, padding=1, padding_mode="circular")),
        IMAGES,
        [("0", ["2"], (1, 1), [], False)],
    ),
    "flatten": (
        lambda: to_linear(nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(), inner=25),
        IMAGES,
        [("0", ["5"], (1, 25), [], False)],
    ),
    "channels last, then flatten": (
        lambda: to_linear(Fn(lambda s, x: x.permute(0, 2, 3, 1).reshape(len(x), -1)), inner=100),
        IMAGES,
        [("0", ["2"], (100, 1), [], False)],
    ),
    "width in the middle": (
        lambda: to_linear(Fn(lambda s, x: x.permute(0, 2, 1, 3).flatten(1)), inner=100),
        IMAGES,
        [("0", ["2"], (10, 10), [], False)],
    ),
    "global pooling": (
        lambda: to_linear(nn.AdaptiveAvgPool2d(1), nn.Flatten(), inner=1),
        IMAGES,
        [("0", ["3"], (1, 1), [], False)],
    ),
    "width 1 through shapes": (
        lambda: to_linear(nn.AdaptiveMaxPool2d(1), Fn(lambda s, x: x.squeeze(-1).squeeze(-1)), inner=1, channels=1),
        IMAGES,
        [("0", ["3"], (1, 1), [], False)],
    ),
    "mean over positions": (
        lambda: to_linear(Fn(lambda s, x: x.mean((-2, -1))), inner=1),
        IMAGES,
        [("0", ["2"], (1, 1), [], False)],
    ),
    "maximum over positions": (
        lambda: to_linear(Fn(lambda s, x: x.flatten(2).max(dim=-1)[0]), inner=1),
        IMAGES,
        [("0", ["2"], (1, 1), [], False)],
    ),
    "interpolation": (
        lambda: convolutions(nn.Upsample(scale_factor=2, mode="bilinear")),
        IMAGES,
        [("0", ["2"], (1, 1), [], False)],
    ),
    "residual stream": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 1), Residual(4), Residual(4), nn.Flatten(), nn.Linear(576, 2)),
        IMAGES,
        [
            ("1.conv1", ["1.conv2"], (1, 1), ["batch_norm"], True),
            ("2.conv1", ["2.conv2"], (1, 1), ["batch_norm"], True),
        ],
    ),
    "transformer layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        TOKENS,
        [("linear1", ["linear2"], (1, 1), [], False)],
    ),
}


@pytest.mark.parametrize("name", OFFERED)
def test_sites_are_exactly_these(name: str) -> None:
    build, shape, expected = OFFERED[name]
    sites = find_sites(build(), batch(*shape))
    found = [
        (s.name, list(s.consumers), (s.readings[0].outer, s.readings[0].inner), [c.kind for c in s.carriers],
         s.readings[0].padded)
        for s in sites
    ]  # fmt: skip
    assert found == expected
    for site in sites:
        verify(site)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["flatten", "residual stream", "group norm", "slopes", "instance norm"])
def test_growth_by_hand_keeps_the_output(name: str, training: bool) -> None:
    build, shape, _ = OFFERED[name]
    torch.manual_seed(0)
    model, example = build().double().train(training), batch(*shape).double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for site in find_sites(model, example):
        grown = wider(model, site, 2 * site.group)
        assert torch.allclose(grown(example), copy.deepcopy(model)(example), rtol=1e-10, atol=1e-10)
        assert grown.get_submodule(site.name).weight.shape[0] == site.width + 2 * site.group


L6, L5 = (lambda: nn.Linear(8, 6)), (lambda: nn.Linear(6, 5))

# Models with the example's shape, and for every width that is refused a pattern of the reason.
REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, str]]] = {
    "output": (L6, VECTORS, {"": "model's output"}),
    "output in an object": (
        lambda: pair(lambda s, x: (lambda h: SimpleNamespace(h=h, y=s.b(h)))(s.a(x))),
        VECTORS,
        {"a": "model's output"},
    ),
    "nothing to compare": (lambda: pair(lambda s, x: s.b(s.a(x)).argmax(-1)), VECTORS, {"a": "no finite"}),
    "not a number": (lambda: pair(lambda s, x: s.b(s.a(x)) * float("nan")), VECTORS, {"a": "no finite"}),
    "table without samples": (
        lambda: pair(lambda s, x: x.sum() + s.b(s.a(s.table)), table=nn.Parameter(torch.ones(5, 8))),
        VECTORS,
        {"a": "samples on its first axis"},
    ),
    "tokens before samples": (
        lambda: pair(lambda s, x: s.b(F.relu(s.a(x.transpose(0, 1)))).transpose(0, 1)),
        TOKENS,
        {"a": "samples on its first axis"},
    ),
    "output behind a shape": (lambda: Fn(lambda s, x: [s.a(x).flatten()], a=L6()), VECTORS, {"a": "model's output"}),
    "layer norm": (
        lambda: pair(lambda s, x: s.b(s.norm(s.a(x))), norm=nn.LayerNorm(6)),
        VECTORS,
        {"a": r"normalised over its neurons by layer_norm in 'norm'"},
    ),
    "rms norm": (lambda: pair(lambda s, x: s.b(F.rms_norm(s.a(x), (6,)))), VECTORS, {"a": "normalised over"}),
    "softmax": (lambda: pair(lambda s, x: s.b(s.a(x).softmax(-1))), VECTORS, {"a": "softmax"}),
    "concatenation": (
        lambda: Fn(lambda s, x: s.c(torch.cat([s.a(x), s.b(x)], 1)), a=L6(), b=L6(), c=nn.Linear(12, 3)),
        VECTORS,
        {"a": "concatenated", "b": "concatenated"},
    ),
    "two widths multiplied": (
        lambda: Fn(lambda s, x: s.c(F.silu(s.a(x)) * s.b(x)), a=L6(), b=L6(), c=nn.Linear(6, 3)),
        VECTORS,
        {"a": "multiplied by the output of 'b'", "b": "multiplied by the output of 'a'"},
    ),
    "gate of its own": (
        lambda: Fn(lambda s, x: s.b(F.glu(s.a(x))), a=L6(), b=nn.Linear(3, 2)),
        VECTORS,
        {"a": r"split \(glu\)"},
    ),
    "chunks": (
        lambda: Fn(lambda s, x: (lambda p: s.b(p[0] * p[1]))(s.a(x).chunk(2, -1)), a=L6(), b=nn.Linear(3, 3)),
        VECTORS,
        {"a": "split by chunk"},
    ),
    "channel shuffle": (
        lambda: Fn(lambda s, x: s.b(s.a(x).view(-1, 2, 3).transpose(1, 2).flatten(1)), a=L6(), b=nn.Linear(6, 3)),
        VECTORS,
        {"a": "split into groups by view"},
    ),
    "a size in the forward": (
        lambda: pair(lambda s, x: s.b(F.relu(s.a(x)).view(-1, 6))),
        VECTORS,
        {"a": "a size is written into its forward"},
    ),
    "indexing": (
        lambda: Fn(lambda s, x: s.b(s.a(x)[:, :4]), a=L6(), b=nn.Linear(4, 3)),
        VECTORS,
        {"a": "indexed along its neurons"},
    ),
    "writing": (
        lambda: pair(lambda s, x: (lambda h, o: (o.__setitem__(slice(None), h), s.b(o))[1])(s.a(x), torch.zeros(4, 6))),
        VECTORS,
        {"a": "written into another tensor"},
    ),
    "sum over the width": (lambda: pair(lambda s, x: s.b(s.a(x)) + s.a(x).sum()), VECTORS, {"a": "reduced"}),
    "numbers": (
        lambda: pair(lambda s, x: (lambda h: s.b(h) * h[0, 0].item())(s.a(x))),
        VECTORS,
        {"a": "indexed along"},
    ),
    "numpy": (lambda: pair(lambda s, x: s.b(torch.from_numpy(s.a(x).numpy()))), VECTORS, {"a": "numpy"}),
    "layer scale": (
        lambda: pair(lambda s, x: s.b(s.a(x) * s.gamma), gamma=nn.Parameter(torch.ones(6))),
        VECTORS,
        {"a": "learnable tensor 'gamma'"},
    ),
    "weight penalty": (
        lambda: pair(lambda s, x: s.b(s.a(x)) + s.a.weight.norm()),
        VECTORS,
        {"a": "its weight is used by norm"},
    ),
    "consumer's weight used": (
        lambda: pair(lambda s, x: s.b(s.a(x)) + s.b.weight.sum()),
        VECTORS,
        {"a": "'b' does not work alone"},
    ),
    "tied autoencoder": (
        lambda: Fn(lambda s, x: F.linear(torch.relu(s.a(x)), s.a.weight.t()), a=L6()),
        VECTORS,
        {"a": "weight that is not a layer's own"},
    ),
    "called twice": (
        lambda: pair(lambda s, x: s.b(s.m(F.relu(s.m(s.a(x))))), m=nn.Linear(6, 6)),
        VECTORS,
        {"a": "'m' is called 2 times", "m": "'m' is called 2 times"},
    ),
    "recurrence": (
        lambda: pair(lambda s, x: s.b(s.r(s.a(x))[0]), r=nn.LSTM(6, 6, batch_first=True)),
        TOKENS,
        {"a": "LSTM", "r": "LSTM is not supported"},
    ),
    "attention": (
        lambda: pair(lambda s, x: s.b(s.r(s.a(x), x, x)[0]), hidden=8, r=nn.MultiheadAttention(8, 2)),
        TOKENS,
        {"a": "MultiheadAttention", "r": "not supported", "r.out_proj": "not called"},
    ),
    "depthwise": (
        lambda: convolutions(nn.Conv2d(6, 6, 3, groups=6)),
        IMAGES,
        {"0": r"'1' \(Conv2d\): a convolution with groups=6", "1": "groups=6"},
    ),
    "transposed": (
        lambda: convolutions(nn.ConvTranspose2d(6, 6, 3)),
        IMAGES,
        {"0": "ConvTranspose2d", "1": "ConvTranspose2d is not supported"},
    ),
    "weight norm": (
        lambda: pair(lambda s, x: s.b(s.m(F.relu(s.a(x)))), m=nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))),
        VECTORS,
        {"m": "weight norm", "a": "weight norm"},
    ),
    "dilated max pooling": (lambda: convolutions(nn.MaxPool2d(2, dilation=2)), IMAGES, {"0": "dilated"}),
    "padding of channels": (
        lambda: nn.Sequential(nn.Conv2d(3, 6, 1), Fn(lambda s, x: F.pad(x, (0, 0, 0, 0, 1, 1))), nn.Conv2d(8, 2, 1)),
        IMAGES,
        {"0": "padded over its neurons"},
    ),
    "interpolation to a size": (lambda: convolutions(nn.Upsample(size=20)), IMAGES, {"0": "fixed size"}),
    "lp pooling": (lambda: convolutions(nn.LPPool2d(2, 2)), IMAGES, {"0": "lp_pool2d"}),
    "pixel shuffle": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.PixelShuffle(2), nn.Conv2d(2, 2, 1)),
        IMAGES,
        {"0": "pixel_shuffle"},
    ),
    "mixed over samples": (
        lambda: pair(lambda s, x: s.b(s.a(x).mean(0, keepdim=True))),
        VECTORS,
        {"a": "samples no longer stand on the first axis"},
    ),
    "dead end": (
        lambda: pair(lambda s, x: (s.a(x), s.c(x))[1], c=nn.Linear(8, 2)),
        VECTORS,
        {"a": "no supported layer"},
    ),
    "unread copy": (
        lambda: pair(lambda s, x: (lambda h: s.b(h) + unseen_sum(h))(s.a(x))),
        VECTORS,
        {"a": "changed the output by"},
    ),
    "unread copy of a rectified width": (
        lambda: pair(lambda s, x: (lambda h: s.b(h) + unseen_sum(h))(F.relu(s.a(-9 * x.abs())))),
        VECTORS,
        {"a": "changed the output by"},
    ),
    "unread copy behind a gate at 0": (
        lambda: pair(
            lambda s, x: (lambda h: s.b(h) + s.gate * unseen_sum(h))(s.a(x)), gate=nn.Parameter(torch.zeros(1))
        ),
        VECTORS,
        {"a": "changed the output by"},
    ),
    "residual": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 1), Residual(4), nn.Flatten(), nn.Linear(576, 2)),
        IMAGES,
        {"0": "output of '1.conv2' in '1' .Residual. .a residual stream.", "1.conv2": "residual stream"},
    ),
}


def unseen_sum(tensor: Tensor) -> Tensor:
    """A sum that no torch function mode sees, as in compiled code."""
    with torch._C.DisableTorchFunction():
        return tensor.sum()


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_their_reason(name: str) -> None:
    build, shape, expected = REFUSED[name]
    sites = find_sites(build(), batch(*shape))
    reasons = {refusal.name: refusal.reason for refusal in sites.refused}
    for producer, pattern in expected.items():
        assert producer not in [site.name for site in sites]
        assert re.search(pattern, reasons[producer]), reasons[producer]


def test_tied_weights_are_refused_by_name() -> None:
    model = pair(lambda s, x: s.b(F.relu(s.a(x))) + s.b(F.relu(s.c(x))), c=L6())
    model.c.weight = model.a.weight
    reasons = {r.name: r.reason for r in find_sites(model, batch(*VECTORS)).refused}
    assert "'a.weight' is 'c.weight'" in reasons["a"]
    assert "'a.weight' is 'c.weight'" in reasons["c"]


def test_slots_and_counts_of_a_flattened_width() -> None:
    model = to_linear(nn.GroupNorm(2, 6), nn.Flatten(), inner=100)
    (site,) = find_sites(model, batch(*IMAGES))
    assert site.slots == (
        Slot("0", "weight", 0, "fan_in"),
        Slot("0", "bias", 0, "fan_in"),
        Slot("1", "weight", 0, "carried"),
        Slot("1", "bias", 0, "carried"),
        Slot("3", "weight", 1, "fan_out", 1, 100),
    )
    counts = {(c.module, c.attribute): (c.times, c.per) for c in site.counts}
    assert counts == {
        ("0", "out_channels"): (1, 1),
        ("1", "num_channels"): (1, 1),
        ("1", "num_groups"): (1, 3),
        ("3", "in_features"): (100, 1),
    }
    assert (site.width, site.group, site.uses) == (6, 3, {"0": 100, "3": 1})


def test_norm_behind_the_consumer() -> None:
    (first, second) = find_sites(nn.Sequential(Residual(3), Residual(3)), batch(2, 3, 6, 6))
    assert first.readings[0].norm == "0.norm2"
    assert second.readings[0].norm == "1.norm2"
    model = Fn(lambda s, x: (lambda h: s.n(h) + h)(s.b(s.a(x))), a=L6(), b=L5(), n=nn.BatchNorm1d(5))
    (site,) = find_sites(model, batch(*VECTORS))
    assert site.readings[0].norm is None


LINEAR_PATHS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "conv": (convolutions, IMAGES, (2, 3, 9, 11)),
    "conv, circular": (
        lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 2, 3, padding=1, padding_mode="circular", stride=2)),
        IMAGES,
        (2, 3, 9, 11),
    ),
    "average pooling": (
        lambda: convolutions(nn.AvgPool2d(3, 2, padding=1, ceil_mode=True, count_include_pad=False)),
        IMAGES,
        (2, 3, 15, 10),
    ),
    "zeros, upsampling": (
        lambda: convolutions(nn.ZeroPad2d((1, 2, 0, 1)), nn.Upsample(scale_factor=2, mode="bilinear")),
        IMAGES,
        (3, 3, 9, 10),
    ),
    "global pooling": (lambda: to_linear(nn.AdaptiveAvgPool2d(1), nn.Flatten(), inner=1), IMAGES, (7, 3, 15, 9)),
    "pooling to 2 x 2": (lambda: to_linear(nn.AdaptiveAvgPool2d(2), nn.Flatten(), inner=4), IMAGES, (7, 3, 15, 9)),
    "flatten": (lambda: to_linear(nn.AvgPool2d(2), nn.Flatten(), inner=25), IMAGES, (3, 3, 12, 12)),
    "width in the middle": (
        lambda: to_linear(Fn(lambda s, x: x.permute(0, 2, 1, 3).flatten(1)), inner=100), IMAGES, (3, 3, 12, 12)),
    "flattened, then parted": (
        lambda: to_linear(Fn(lambda s, x: x.flatten(2).transpose(1, 2).mean(1)), inner=1), IMAGES, (3, 3, 9, 12)),
    "sum, slices": (lambda: to_linear(Fn(lambda s, x: x[:, :, 1:, -1].sum(-1)), inner=1), IMAGES, (3, 3, 9, 12)),
    "tokens": (lambda: pair(lambda s, x: s.b(s.a(x)[:, 0])), TOKENS, (3, 9, 8)),
    "merged tokens": (lambda: pair(lambda s, x: s.b(s.a(x.view(-1, 8)).view(len(x), -1, s.a.out_features))), TOKENS,
                      (3, 5, 8)),
    "1d": (lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.AvgPool1d(2), nn.Conv1d(4, 2, 2)), (2, 3, 12), (4, 3, 15)),
    "3d": (
        lambda: nn.Sequential(nn.Conv3d(3, 4, 3), nn.AvgPool3d(2, padding=1), nn.Conv3d(4, 2, 2)),
        (2, 3, 6, 6, 6),
        (1, 3, 7, 6, 8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LINEAR_PATHS)
def test_push_is_what_the_consumer_reads_of_new_neurons(name: str) -> None:
    build, shape, other_shape = LINEAR_PATHS[name]
    torch.manual_seed(0)
    model = build().double()
    (site,) = find_sites(model, batch(*shape).double())
    (reading,) = site.readings
    push = pickle.loads(pickle.dumps(reading.push))
    for size in (shape, other_shape):
        example = batch(*size, seed=1).double()
        grown = wider(model, site, 2, zero=())
        with torch.no_grad():
            _, produced = seen_by(grown, site.name, example)
            axis = 1 if isinstance(grown.get_submodule(site.name), nn.modules.conv._ConvNd) else -1
            pushed = push(produced.narrow(axis, site.width, 2))
            consumer = copy.deepcopy(grown.get_submodule(reading.consumer))
            slot = next(s for s in site.slots if s.role == "fan_out")
            columns = consumer.weight.unflatten(1, (slot.outer, site.width + 2, slot.inner))[:, :, site.width :]
            consumer.weight, consumer.bias = nn.Parameter(columns.flatten(1, 3)), None
            new = consumer(pushed)
            difference = seen_by(grown, reading.consumer, example)[1] - seen_by(model, reading.consumer, example)[1]
        assert torch.allclose(new, difference, rtol=1e-9, atol=1e-9)


def test_max_pooling_is_pushed_as_an_average() -> None:
    (site,) = find_sites(convolutions(nn.MaxPool2d(3, 2, padding=1, ceil_mode=True)), batch(*IMAGES))
    x = batch(2, 5, 9, 9)
    expected = F.avg_pool2d(x, 3, 2, padding=1, ceil_mode=True, count_include_pad=False)
    assert torch.equal(site.readings[0].push(x), expected)


class Moody(nn.Module):
    """Has an auxiliary head in training mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(8, 6), nn.Linear(6, 3), nn.Linear(8, 5), nn.Linear(5, 3)
        self.e, self.f = nn.Linear(8, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h, k = F.relu(self.a(x)), F.relu(self.e(x))
        extra = (self.d(F.relu(self.c(x))), self.b(h)) if self.training else (self.b(h),)
        return (*extra, self.f(k)) if not self.training else (*extra, self.f(2 * k.tanh() if x.sum() > 1e9 else k))


def test_what_exists_in_one_mode_only() -> None:
    model = Moody()
    assert [site.name for site in find_sites(model.train(), batch(*VECTORS))] == ["a", "e", "c"]
    sites = find_sites(model.eval(), batch(*VECTORS))
    assert [site.name for site in sites] == ["a", "e"]
    assert "training mode only" in {r.name: r.reason for r in sites.refused}["c"]


def test_other_readers_in_the_other_mode_are_refused() -> None:
    model = Fn(lambda s, x: (lambda h: (s.b(h), s.c(h) if s.training else None))(s.a(x)), a=L6(), b=L5(), c=L5())
    assert "in training mode than" in {r.name: r.reason for r in find_sites(model, batch(*VECTORS)).refused}["a"]


def test_nothing_is_changed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(), nn.Conv2d(6, 4, 3))
    model[1].eval()
    model(batch(*IMAGES)).sum().backward()
    model.kept = model(batch(*IMAGES))
    example = batch(*IMAGES)
    state, tensors = copy.deepcopy(model.state_dict()), {k: id(v) for k, v in model.state_dict(keep_vars=True).items()}
    gradients = [p.grad.clone() for p in model.parameters()]
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy(), example.clone()
    find_sites(model, example)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert tensors == {k: id(v) for k, v in model.state_dict(keep_vars=True).items()}
    assert all(torch.equal(a, p.grad) for a, p in zip(gradients, model.parameters(), strict=True))
    assert [m.training for m in model.modules()] == [True, True, False, True, True, True]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert np.array_equal(before[2], np.random.get_state()[1])
    assert torch.equal(before[3], example)


def test_examples_of_every_form() -> None:
    x = batch(*VECTORS)
    model = Fn(lambda s, x, y: s.b(F.relu(s.a(x + y))), a=L6(), b=L5())
    assert len(find_sites(model, (x, x))) == len(find_sites(model, {"x": x, "y": x})) == 1
    large = nn.Sequential(L6(), nn.ReLU(), L5())
    assert find_sites(large, batch(100, 8))[0].uses == {"0": 1, "2": 1}
    frozen_batch = nn.Sequential(L6(), Fn(lambda s, x: x.reshape(20, -1)), L5())
    assert len(find_sites(frozen_batch, batch(20, 8))) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_types(dtype: torch.dtype) -> None:
    assert len(find_sites(nn.Sequential(L6(), nn.ReLU(), L5()).to(dtype), batch(*VECTORS).to(dtype))) == 1


def test_bad_input_is_named() -> None:
    model = nn.Sequential(L6(), nn.ReLU(), L5())
    with pytest.raises(InputError, match="shapes cannot be multiplied"):
        find_sites(model, batch(4, 9))
    with pytest.raises(InputError, match="no batch in `example`"):
        find_sites(model, None)
    with pytest.raises(InputError, match="lazy"):
        find_sites(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2)), batch(*VECTORS))
    with pytest.raises(WrapperError, match=r"model\.module"):
        find_sites(nn.DataParallel(model), batch(*VECTORS))


def test_a_compiled_model_is_analysed_inside() -> None:
    model = nn.Sequential(L6(), nn.ReLU(), L5())
    (site,) = find_sites(torch.compile(model), batch(*VECTORS))
    assert site.model is model


def test_verify_notices_changes() -> None:
    model = nn.Sequential(L6(), nn.BatchNorm1d(6), nn.Linear(6, 3))
    (site,) = find_sites(model, batch(*VECTORS))
    verify(site)
    model[2] = nn.Linear(7, 3)
    with pytest.raises(ModelChangedError, match=r"2\.weight"):
        verify(site)
    model[2] = nn.ReLU()
    with pytest.raises(ModelChangedError, match="find_sites"):
        verify(site)
    model[2] = nn.Linear(6, 3)
    model[1].num_features = 9
    with pytest.raises(ModelChangedError, match=r"1\.num_features"):
        verify(site)
