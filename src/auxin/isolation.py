"""Contexts in which a model can be run without a trace: random state and buffers are as before afterwards."""

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import nn


@contextmanager
def same_random_state(model: nn.Module) -> Iterator[None]:
    """Python's, numpy's and torch's generators (on every device of the model) end where they started."""
    devices = {p.device for p in model.parameters()} | {b.device for b in model.buffers()}
    states = random.getstate(), np.random.get_state()
    cuda = [device for device in devices if device.type == "cuda"]
    try:
        with torch.random.fork_rng(devices=cuda):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextmanager
def same_buffers(model: nn.Module) -> Iterator[None]:
    """Passes write to clones of the buffers; the model's own are put back untouched."""
    own = [(module, dict(module._buffers)) for module in model.modules()]
    try:
        for module, buffers in own:
            module._buffers.update({name: b if b is None else b.clone() for name, b in buffers.items()})
        yield
    finally:
        for module, buffers in own:
            module._buffers.clear()
            module._buffers.update(buffers)


@contextmanager
def isolated(model: nn.Module) -> Iterator[None]:
    """Both, with gradients enabled whatever the caller's mode, and compiled parts run as they were written."""
    with ExitStack() as stack:
        modes = torch.inference_mode(False), torch.enable_grad()
        for context in (*modes, same_random_state(model), same_buffers(model)):
            stack.enter_context(context)
        if "torch._dynamo" in sys.modules:  # compiled code does not call hooks
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def reseed(seed: int) -> None:
    """Start torch's generators at a seed; without the cost of `torch.manual_seed` where no accelerator is in use."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
