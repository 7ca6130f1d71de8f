"""Optimizer state that follows its parameters through a growth.

One table says how each entry of each optimizer's state follows the parameter; what it does not name is refused.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from auxin.edits import Draft, Rule
from auxin.errors import OptimizerError
from auxin.structure import Change, Site, slot_tensor

Rules = Mapping[str, Rule | None]

# A parameter times s has a gradient 1/s times as large: that is the degree of an average of gradients, twice that of
# an average of squares. What is kept in units of the parameter itself (ASGD's average, Adadelta's steps) goes with s.
FIRST = Rule("zero", degree=-1)
SECOND = Rule("mean", degree=-2)
SCALAR = None

_ADAM: Rules = {"step": SCALAR, "exp_avg": FIRST, "exp_avg_sq": SECOND, "max_exp_avg_sq": SECOND}

STATES: dict[type[Optimizer], Rules] = {
    torch.optim.SGD: {"momentum_buffer": FIRST},
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.NAdam: {**_ADAM, "mu_product": SCALAR},
    torch.optim.RAdam: _ADAM,
    torch.optim.Adamax: {"step": SCALAR, "exp_avg": FIRST, "exp_inf": Rule("mean", degree=-1)},
    torch.optim.Adagrad: {"step": SCALAR, "sum": SECOND},
    torch.optim.RMSprop: {
        "step": SCALAR,
        "square_avg": SECOND,
        "grad_avg": FIRST,
        "momentum_buffer": Rule("zero"),  # of gradients over their root mean square
    },
    torch.optim.Adadelta: {"step": SCALAR, "square_avg": SECOND, "acc_delta": Rule("mean", degree=2)},
    torch.optim.Adafactor: {
        "step": SCALAR,
        "row_var": Rule("mean", degree=-2, reduced=-1),
        "col_var": Rule("mean", degree=-2, reduced=-2),
        "variance": SECOND,
    },
    torch.optim.ASGD: {"step": SCALAR, "eta": SCALAR, "mu": SCALAR, "ax": Rule("own", degree=1)},
    torch.optim.Rprop: {"step": SCALAR, "prev": FIRST, "step_size": Rule("mean", degree=1)},
    torch.optim.Muon: {"momentum_buffer": FIRST},
}


class Move(NamedTuple):
    """One entry of an optimizer's state, and what it becomes."""

    state: dict[str, Any]
    key: str
    value: Tensor


def register(optimizer: type[Optimizer], rules: Rules) -> None:
    """Declare the state of an optimizer class: a `Rule` for every key, None for what is no tensor of its parameter.

    >>> class Mine(torch.optim.SGD): ...
    >>> register(Mine, {"momentum_buffer": FIRST, "clock": SCALAR})
    """
    STATES[optimizer] = dict(rules)


def as_optimizers(optimizer: Optimizer | Sequence[Optimizer] | None) -> tuple[Optimizer, ...]:
    """The optimizers that a user passed, as a tuple; what is no optimizer is refused."""
    given = optimizer if isinstance(optimizer, Sequence) else (optimizer,)
    optimizers = tuple(item for item in given if item is not None)
    for item in optimizers:
        rules_of(item)
    return optimizers


def rules_of(optimizer: Optimizer) -> Rules:
    """The rules of an optimizer's class, or of the nearest base class that has some."""
    if not isinstance(optimizer, Optimizer):
        raise OptimizerError(
            f"{type(optimizer).__name__} is not a torch.optim.Optimizer; pass the optimizer itself "
            "(schedulers and gradient scalers need nothing: they keep working)"
        )
    rules = next((STATES[base] for base in type(optimizer).__mro__ if base in STATES), None)
    if rules is None:
        known = ", ".join(sorted(cls.__name__ for cls in STATES))
        raise OptimizerError(
            f"the state of {type(optimizer).__name__} is not known, so it cannot follow a change of shapes; known are "
            f"{known}; for another one call auxin.optimizers.register(cls, rules) first"
        )
    return rules


def check(model: nn.Module, grown: Iterable[Site | Change], optimizers: Sequence[Optimizer]) -> None:
    """Raise OptimizerError unless the optimizers, if there are any, train this model and all that grows in it."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held: set[int] = set()
    for optimizer in optimizers:
        rules_of(optimizer)
        ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if ids.isdisjoint(names):
            raise OptimizerError(
                f"{type(optimizer).__name__} holds no parameter of this model; build it from the parameters of the "
                "model that grows (after model.to(...) or a deepcopy), or do not pass it"
            )
        held |= ids
    missing = [name for parameter, name in _trainable(model, grown) if id(parameter) not in held]
    if optimizers and missing:
        raise OptimizerError(
            f"no optimizer holds {', '.join(dict.fromkeys(missing))}, which would grow and not be trained; add them "
            "with optimizer.add_param_group(...), or freeze them with requires_grad_(False)"
        )


def moves(optimizers: Sequence[Optimizer], drafts: Iterable[Draft]) -> list[Move]:
    """What becomes of every optimizer's state when the parameters become their drafts; nothing is changed yet."""
    return [
        move
        for draft in drafts
        for optimizer in optimizers
        for move in _moves_of(optimizer, draft, optimizer.state.get(draft.tensor, {}))
    ]


def _trainable(model: nn.Module, grown: Iterable[Site | Change]) -> Iterator[tuple[Tensor, str]]:
    for item in grown:
        site = item.site if isinstance(item, Change) else item
        for slot in site.slots:
            tensor = slot_tensor(model, slot)
            if tensor.requires_grad:
                yield tensor, slot.name


def _moves_of(optimizer: Optimizer, draft: Draft, state: dict[str, Any]) -> Iterator[Move]:
    rules = rules_of(optimizer)
    unknown = sorted(set(state) - set(rules))
    if unknown:
        raise OptimizerError(
            f"{type(optimizer).__name__} keeps {', '.join(map(repr, unknown))} for {draft.name}, and how that "
            f"follows a change of shapes is not known (known: {', '.join(sorted(rules))}); declare it with "
            "auxin.optimizers.register(cls, rules)"
        )
    if not draft.steps:
        return
    for key, value in state.items():
        rule = rules[key]
        if rule is not None and value is not None:
            _check_shape(optimizer, draft, key, value, rule)
            yield Move(state, key, draft.follow(value, rule))
    step = state.get("step")
    if torch.is_tensor(step) and _never_moved(state, rules):
        yield Move(state, "step", torch.zeros_like(step))


def _never_moved(state: dict[str, Any], rules: Rules) -> bool:
    """Whether a parameter never had a gradient, as behind dead units.

    Its averages then have everything to learn, while the bias correction of a late step says that they are settled:
    Adam would move it six times as far as at the start.
    """
    averages = [state[key] for key, rule in rules.items() if rule is SECOND and torch.is_tensor(state.get(key))]
    return bool(averages) and not any(bool(average.any()) for average in averages)


def _check_shape(optimizer: Optimizer, draft: Draft, key: str, value: object, rule: Rule) -> None:
    wanted = rule.shape(draft.tensor)
    shape = tuple(value.shape) if torch.is_tensor(value) else type(value).__name__
    if shape != wanted:
        raise OptimizerError(
            f"{type(optimizer).__name__} keeps {key!r} of shape {shape} for {draft.name}, where {wanted} is expected; "
            "was the model changed after the optimizer's last step? Build the optimizer anew"
        )
