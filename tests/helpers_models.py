"""Random models in the middle of their training, and how they are to grow: the strategies of the property tests."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

import auxin

OUTPUTS = 3
FIRST_SITE = "body.0"

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
BATCH_NORMS = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
INSTANCE_NORMS = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
MAX_POOLS = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
AVERAGE_POOLS = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
ADAPTIVE_POOLS = {
    1: (nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d),
    2: (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
    3: (nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d),
}
DROPOUTS = (nn.Dropout, nn.AlphaDropout)
ACTIVATIONS = (
    nn.ReLU, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.SELU, nn.ELU, nn.Hardswish,
)  # fmt: skip
FUNCTIONS = (torch.relu, torch.tanh, torch.sigmoid, F.gelu, F.leaky_relu, F.softplus, F.mish)
METHODS = ("sprout", "tiny", "gradmax", "random")

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-3),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=1e-3, momentum=0.9),
    "nesterov": lambda groups: torch.optim.SGD(groups, lr=1e-3, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda groups: torch.optim.Adam(groups, lr=1e-3),
    "amsgrad": lambda groups: torch.optim.AdamW(groups, lr=1e-3, amsgrad=True),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=1e-3),
    "radam": lambda groups: torch.optim.RAdam(groups, lr=1e-3),
    "adamax": lambda groups: torch.optim.Adamax(groups, lr=1e-3),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-3),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, momentum=0.9, centered=True),
    "adadelta": lambda groups: torch.optim.Adadelta(groups, lr=1e-1),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
}


class Function(nn.Module):
    """A torch function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def extra_repr(self) -> str:
        return self.function.__name__


class GlobalMean(nn.Module):
    """The mean over all positions, keeping channels."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).mean(-1)


class Beside(nn.Module):
    """A branch added to the stream, which a norm may precede."""

    def __init__(self, norm: nn.Module, branch: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(self.norm(x))


class Net(nn.Module):
    """A body whose last width one or two linear heads read."""

    def __init__(self, body: list[nn.Module], heads: list[nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)
        self.heads = nn.ModuleList(heads)

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x)
        return torch.cat([head(features) for head in self.heads], dim=1)


@dataclass(repr=False)
class Case:
    """A model in the middle of its training, the data, and what is asked of a growth.

    `seed` is a copy of the model from before its first step; `stale` a loss whose graph is alive.
    """

    model: nn.Module
    batches: list[tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizers: list[Optimizer]
    request: dict[str, Any]
    seed: nn.Module
    stale: Tensor

    def __repr__(self) -> str:
        x, names = self.example, [type(optimizer).__name__ for optimizer in self.optimizers]
        return f"{self.model}\ntraining={self.model.training} x={tuple(x.shape)} {x.dtype} {names} {self.request}"

    @property
    def example(self) -> Tensor:
        """The first batch's input."""
        return self.batches[0][0]

    @property
    def far(self) -> bool:
        """Whether the inputs have a mean of 100."""
        return bool(self.example.abs().mean() > 50)

    def grow(self, **changed: Any) -> auxin.Growth:
        """One growth as asked, but for what is `changed`."""
        request = {**self.request, **changed}
        return auxin.grow(self.model, self.batches, self.loss, optimizer=self.optimizers, **request)


def make_step(case: Case, model: nn.Module, optimizers: list[Optimizer], index: int = 0) -> Tensor:
    """One ordinary training step, with the random numbers of its index; the loss."""
    torch.manual_seed(index)
    for optimizer in optimizers:
        optimizer.zero_grad()
    x, y = case.batches[index % len(case.batches)]
    loss = case.loss(model(x), y)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss


# --- layers ----------------------------------------------------------------------------------------------------


def activation(draw: st.DrawFn, width: int) -> list[nn.Module]:
    """An activation, as a module or a function, and perhaps dropout."""
    kind = draw(st.sampled_from([*ACTIVATIONS, *FUNCTIONS, nn.PReLU, "prelu by channel", "in place"]))
    if kind == "prelu by channel":
        layers = [nn.PReLU(width)]
    elif kind == "in place":
        layers = [nn.ReLU(inplace=True)]
    else:
        layers = [Function(kind) if kind in FUNCTIONS else kind()]
    return [*layers, *([draw(st.sampled_from(DROPOUTS))(0.3)] if draw(st.integers(0, 4)) == 0 else [])]


def norm(draw: st.DrawFn, dims: int, shape: torch.Size) -> list[nn.Module]:
    """None, or one norm over the channels of tensors (n, channels, *positions), by group, or beside them."""
    width, positions = shape[1], shape[2:].numel()
    kinds = ["none", "batch", "batch", "plain batch", "stateless batch", "group"]
    if dims and positions > 1:
        kinds += ["instance", "tracking instance", "layer"]
    kind = draw(st.sampled_from(kinds))
    if kind == "none" or (shape[0] * positions == 1 and kind != "group"):
        return []
    if kind == "group":
        # A group of one entry is normalised to 0 whatever comes in.
        groups = [g for g in (1, 2, 3) if width % g == 0 and width // g * positions > 1]
        return [nn.GroupNorm(draw(st.sampled_from(groups)), width)] if groups else []
    if kind == "layer":
        return [nn.LayerNorm(shape[2:])]
    if "instance" in kind:
        tracking = kind == "tracking instance"
        return [INSTANCE_NORMS[dims](width, affine=draw(st.booleans()), track_running_stats=tracking)]
    return [BATCH_NORMS[dims](width, affine=kind != "plain batch", track_running_stats=kind != "stateless batch")]


def convolution(draw: st.DrawFn, dims: int, shape: torch.Size, width: int) -> nn.Module:
    """A convolution of any geometry that fits its input (n, channels, *positions)."""
    each = st.tuples(*[st.integers(1, 3)] * dims)
    kernel = tuple(min(k, size) for k, size in zip(draw(each), shape[2:], strict=True))
    stride = tuple(min(s, 2) for s in draw(each))
    mode = draw(st.sampled_from(["zeros", "zeros", "circular", "reflect", "replicate"]))
    most = min(shape[2:]) - 1 if mode == "reflect" else min(shape[2:])
    padding = tuple(min(p - 1, most) for p in draw(each))
    dilation = tuple(
        d if d * (k - 1) < size else 1
        for d, k, size in zip(draw(st.tuples(*[st.integers(1, 2)] * dims)), kernel, shape[2:], strict=True)
    )
    return CONVOLUTIONS[dims](
        shape[1], width, kernel, stride, padding, dilation, bias=draw(st.booleans()), padding_mode=mode
    )


def keeping(draw: st.DrawFn, dims: int, before: int, width: int) -> nn.Module:
    """A convolution that keeps the number of positions."""
    kernel = draw(st.sampled_from([1, 3]))
    return CONVOLUTIONS[dims](before, width, kernel, padding=kernel // 2, bias=draw(st.booleans()))


def pooling(draw: st.DrawFn, dims: int) -> list[nn.Module]:
    """None, or a max or average pooling."""
    kind = draw(st.sampled_from(["none", "none", "max", "average"]))
    if kind == "none":
        return []
    return [(MAX_POOLS if kind == "max" else AVERAGE_POOLS)[dims](2, padding=draw(st.integers(0, 1)), ceil_mode=True)]


def ending(draw: st.DrawFn, dims: int) -> list[nn.Module]:
    """From positions to rows."""
    kind = draw(st.sampled_from(["flatten", "adaptive", "global", "mean"]))
    if kind == "mean":
        return [GlobalMean()]
    adaptive = draw(st.sampled_from(ADAPTIVE_POOLS[dims]))
    return [*({"flatten": [], "adaptive": [adaptive(2)], "global": [adaptive(1)]}[kind]), nn.Flatten()]


# --- bodies ----------------------------------------------------------------------------------------------------


def after(layers: list[nn.Module], x: Tensor) -> torch.Size:
    """The shape that layers make of an input."""
    with torch.no_grad():
        return nn.Sequential(*layers).eval()(x).shape


def perceptron(draw: st.DrawFn, x: Tensor) -> list[nn.Module]:
    """One to three hidden layers, the later ones perhaps residual."""
    layers: list[nn.Module] = []
    before = x.shape[1]
    for index, width in enumerate(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))):
        if index and draw(st.integers(0, 2)) == 0:
            inner = [nn.Linear(before, width), *norm(draw, 0, torch.Size([len(x), width])), *activation(draw, width)]
            first = draw(st.sampled_from([nn.Identity(), nn.LayerNorm(before)]))
            layers.append(Beside(first, nn.Sequential(*inner, nn.Linear(width, before))))
            continue
        layers += [nn.Linear(before, width, bias=draw(st.booleans()))]
        layers += [*norm(draw, 0, torch.Size([len(x), width])), *activation(draw, width)]
        before = width
    return layers


def convolutional(draw: st.DrawFn, x: Tensor) -> list[nn.Module]:
    """One or two convolutions, perhaps a residual block, and what leads to rows."""
    dims = x.dim() - 2
    layers: list[nn.Module] = []
    for index, width in enumerate(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))):
        if index and draw(st.booleans()):
            layers.append(block(draw, dims, after(layers, x), width))
            continue
        layers.append(convolution(draw, dims, after(layers, x), width))
        layers += [*norm(draw, dims, after(layers, x)), *activation(draw, width)]
        if min(after(layers, x)[2:]) > 1:
            layers += pooling(draw, dims)
    return [*layers, *ending(draw, dims)]


def block(draw: st.DrawFn, dims: int, shape: torch.Size, width: int) -> nn.Module:
    """A residual block with a private width, the consumer perhaps before a batch norm."""
    stream = shape[1]
    inner = [keeping(draw, dims, stream, width), *norm(draw, dims, torch.Size([shape[0], width, *shape[2:]]))]
    inner += [*activation(draw, width), keeping(draw, dims, width, stream)]
    if draw(st.booleans()) and shape[0] * shape[2:].numel() > 1:
        inner.append(BATCH_NORMS[dims](stream))
    return Beside(nn.Identity(), nn.Sequential(*inner))


# --- cases -----------------------------------------------------------------------------------------------------


def inputs(draw: st.DrawFn, dims: int, samples: int) -> Tensor:
    """Inputs of any kind: usual ones, with a mean of 100, with a feature twice, with a constant one."""
    channels = draw(st.integers(1, 5 if dims == 0 else 2))
    size = {0: (), 1: (5,), 2: (4, 4), 3: (3, 3, 3)}[dims]
    x = torch.randn(samples, channels, *size, dtype=torch.float64)
    kind = draw(st.sampled_from(["usual", "usual", "far", "twice", "constant"]))
    if kind == "far":
        x += 100
    if kind == "twice":
        x[:, -1] = x[:, 0]
    if kind == "constant":
        x[:, -1] = 0.0
    return x


def kill_a_unit(model: Net) -> None:
    """The first layer's first unit ignores its input and is far below 0."""
    first = model.get_submodule(FIRST_SITE)
    with torch.no_grad():
        first.get_parameter("weight")[0] = 0
        if first.bias is not None:
            first.get_parameter("bias")[0] = -10


def parts(model: nn.Module, grouped: bool) -> list[dict[str, Any]]:
    """The parameters as one group, or as two with rates of their own."""
    everything = list(model.parameters())
    if not grouped:
        return [{"params": everything}]
    return [{"params": everything[::2]}, {"params": everything[1::2], "lr": 5e-4}]


def optimizers_of(name: str, model: nn.Module, grouped: bool) -> list[Optimizer]:
    """One optimizer, or Muon for the matrices and AdamW for the rest."""
    if name != "muon":
        return [OPTIMIZERS[name](parts(model, grouped))]
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    muon = torch.optim.Muon(matrices, lr=1e-3)
    return [muon, torch.optim.AdamW(rest, lr=1e-3)] if rest else [muon]


def freeze(draw: st.DrawFn, model: nn.Module) -> None:
    """One of the tensors without which a site can still learn."""
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    if vectors and draw(st.integers(0, 4)) == 0:
        draw(st.sampled_from(vectors)).requires_grad_(False)


def targets(draw: st.DrawFn, samples: int, outputs: int) -> tuple[Callable[[Tensor, Tensor], Tensor], Tensor]:
    """A loss of bounded slope, and targets for it."""
    if draw(st.booleans()):
        return F.cross_entropy, torch.randint(0, outputs, (samples,))
    return F.smooth_l1_loss, torch.randn(samples, outputs, dtype=torch.float64)


def neurons(draw: st.DrawFn, model: nn.Module, example: Tensor, method: str) -> Any:
    """Every way of asking for neurons that the method has."""
    kinds = ["number", "number", "dict", "auto", *([] if method == "random" else ["budget"])]
    kind = draw(st.sampled_from(kinds))
    if kind == "dict":
        names = [site.name for site in auxin.find_sites(model, example)]
        chosen = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
        return {name: draw(st.integers(1, 3)) for name in chosen}
    if kind == "budget":
        return auxin.Budget(parameters=draw(st.integers(1, 200)))
    return "auto" if kind == "auto" else draw(st.integers(1, 3))


def networks(draw: st.DrawFn) -> tuple[Net, Tensor]:
    """A perceptron or a convolutional net in float64, and its input."""
    dims, samples = draw(st.sampled_from([0, 0, 1, 2, 2, 3])), draw(st.sampled_from([1, 2, 5, 8, 12]))
    x = inputs(draw, dims, samples)
    body = perceptron(draw, x.float()) if dims == 0 else convolutional(draw, x.float())
    width = after(body, x.float())[1]
    heads = [nn.Linear(width, OUTPUTS, bias=draw(st.booleans())) for _ in range(draw(st.sampled_from([1, 1, 2])))]
    return Net(body, heads), x


def formatted(draw: st.DrawFn, model: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    """Model and input in a type and a memory format, in training or evaluation mode."""
    halves = [torch.bfloat16] if x.dim() < 5 else []  # torch pools no volumes in bfloat16
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.float64, *halves]))
    memory = torch.contiguous_format
    # In channels_last, torch 2.13 crashes on some strides with dilations, and is wrong on some strides in 3 dimensions.
    convolutions = [m for m in model.modules() if isinstance(m, tuple(CONVOLUTIONS.values()))]
    sound = all(max(m.stride) == 1 or (max(m.dilation) == 1 and x.dim() < 5) for m in convolutions)
    if sound and draw(st.booleans()):
        memory = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim(), memory)
    return model.to(dtype, memory_format=memory).train(draw(st.booleans())), x.to(dtype, memory_format=memory)


@st.composite
def cases(draw: st.DrawFn, amplitudes: tuple[float | None, ...] = (0.0, None, 0.3, -0.2)) -> Case:
    """A random model that was trained for two steps, its optimizer, and a growth to be asked for."""
    torch.manual_seed(draw(st.integers(0, 10**6)))
    model, x = networks(draw)
    if draw(st.integers(0, 4)) == 0:
        kill_a_unit(model)
    loss, y = targets(draw, len(x), OUTPUTS * len(model.heads))
    freeze(draw, model)
    model, x = formatted(draw, model, x)  # type: ignore[assignment]
    y = y.to(x.dtype) if y.is_floating_point() else y
    batches = [(x, y)] * draw(st.integers(1, 2))
    optimizers = optimizers_of(draw(st.sampled_from([*OPTIMIZERS, "muon"])), model, draw(st.booleans()))
    method = draw(st.sampled_from(METHODS))
    request = {
        "method": method,
        "neurons": neurons(draw, model, x, method),
        "amplitude": draw(st.sampled_from(amplitudes)),
    }
    case = Case(model, batches, loss, optimizers, request, copy.deepcopy(model), torch.zeros(()))
    for index in range(2):
        make_step(case, model, optimizers, index)
    case.stale = loss(model(x), y)
    return case


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name."""
    yield from model.named_parameters()
    yield from model.named_buffers()
