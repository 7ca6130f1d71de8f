"""Bad input: a named error that says what was given and what is accepted, and nothing has changed."""

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils.prune  # not loaded by torch itself
from torch import Tensor, nn

import auxin
from auxin.errors import (
    AuxinError,
    CheckpointError,
    InputError,
    ModelChangedError,
    NoSiteError,
    NumericalError,
    OptimizerError,
    UnknownNameError,
    WrapperError,
)
from helpers_growth import Batch, batches, mlp, trained, untouched

cross_entropy = nn.functional.cross_entropy
DATA = batches(5)
X, Y = DATA[0]
OPEN = auxin.Policy(neurons=1)


def spoiled(value: float) -> Tensor:
    x = X.clone()
    x[3, 2] = value
    return x


def raising(output: Tensor, target: Tensor) -> Tensor:
    raise ZeroDivisionError("mine")


class Learner:
    """A trained model and its Adam, whose moments are not zero."""

    def __init__(self, *widths: int) -> None:
        self.model: nn.Module = mlp(*(widths or (5, 3, 3)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        trained(self.model, DATA, self.optimizer)


def grow(learner: Learner, data: Any, loss: Any) -> Any:
    return auxin.grow(learner.model, data, loss, optimizer=learner.optimizer, neurons=2)


def step(learner: Learner, data: Any, loss: Any) -> Any:
    grower = auxin.Grower(learner.model, loss, optimizer=learner.optimizer, policy=OPEN)
    before = grower.state_dict()
    try:
        return grower.step(data)
    finally:
        assert grower.state_dict() == before
        assert len(grower.history) == 0


def diagnose(learner: Learner, data: Any, loss: Any) -> Any:
    return auxin.diagnose(learner.model, data, loss)


DATA_ERRORS: dict[str, tuple[Any, type[AuxinError], str]] = {
    "none": ([], InputError, "no batches were given; accepted: an iterable"),
    "number": (3, InputError, "batches is a int; accepted: an iterable of"),
    "tensor": (X, InputError, "batches is a Tensor; accepted: an iterable of"),
    "triple": ([(X, Y, Y)], InputError, r"a tuple of 3; accepted: pairs \(input, target\).*auxin.Objective"),
    "no pair": ([X], InputError, "a batch is a Tensor; accepted: pairs"),
    "no tensor": ([("text", Y)], InputError, "found no tensor in a str; pass auxin.Objective"),
    "scalar": ([(torch.ones(()), Y)], InputError, "found no tensor"),
    "empty": ([(X[:0], Y[:0])], InputError, "batch 0 holds no sample; leave"),
    "nan": ([(spoiled(float("nan")), Y)], NumericalError, "batch 0 holds NaN or infinity; clean the data"),
    "infinite": ([(spoiled(-float("inf")), Y)], NumericalError, "batch 0 holds NaN or infinity"),
    "later nan": ([(X, Y), (spoiled(float("nan")), Y)], NumericalError, "batch 1 holds NaN or infinity"),
    "double": ([(X.double(), Y)], InputError, "the model cannot be run on .*dtype"),
    "features": ([(X[:, :3], Y)], InputError, "the model cannot be run on .*24x3 and 5x3"),
    "later features": ([(X, Y), (X[:, :3], Y)], InputError, "the model raised RuntimeError.*24x3.*pass batches"),
    "rows": ([(X, Y[:3])], InputError, "the loss raised ValueError.*pass one that takes"),
    "meta": ([(X.to("meta"), Y)], InputError, "the model is on cpu, batch 0 on meta; move one"),
    "meta target": ([(X, Y.to("meta"))], InputError, "the loss raised"),
}  # fmt: skip

LOSS_ERRORS: dict[str, tuple[Any, type[AuxinError], str]] = {
    "name": ("mse", InputError, r"loss is 'mse'; accepted: a function loss\(output, target\)"),
    "nan": (lambda o, t: cross_entropy(o, t) * float("nan"), NumericalError, "the loss is nan; growth needs a finite"),
    "infinite": (lambda o, t: cross_entropy(o, t) / 0, NumericalError, "the loss is inf"),
    "gradient": (lambda o, t: (o * 0).abs().sqrt().sum(), NumericalError, "the gradient at the output of '2'"),
    "vector": (
        lambda o, t: cross_entropy(o, t, reduction="none"), InputError, r"a tensor of shape \(24,\).*a real scalar",
    ),
    "complex": (lambda o, t: cross_entropy(o, t) * 1j, InputError, "complex64; accepted: a real scalar"),
    "float": (lambda o, t: float(cross_entropy(o, t)), InputError, "the loss is float; accepted"),
    "nothing": (lambda o, t: None, InputError, "the loss is NoneType; accepted"),
    "detached": (lambda o, t: cross_entropy(o, t).detach(), InputError, "no gradient.*return the loss tensor itself"),
    "constant": (lambda o, t: torch.ones(()), InputError, "the loss has no gradient"),
    "raising": (raising, InputError, "the loss raised ZeroDivisionError: mine; pass one"),
    "objective": (auxin.Objective(raising), InputError, "the objective's fn raised ZeroDivisionError: mine; pass one"),
}  # fmt: skip


@pytest.mark.parametrize("call", [grow, step, diagnose])
@pytest.mark.parametrize("case", DATA_ERRORS)
def test_batches(case: str, call: Callable[..., Any]) -> None:
    data, error, text = DATA_ERRORS[case]
    learner = Learner()
    many = data * 4 if isinstance(data, list) else data
    with untouched(learner.model, learner.optimizer), pytest.raises(error, match=text):
        call(learner, many, cross_entropy)
    grow(learner, DATA, cross_entropy)


@pytest.mark.parametrize("call", [grow, step, diagnose])
@pytest.mark.parametrize("case", LOSS_ERRORS)
def test_losses(case: str, call: Callable[..., Any]) -> None:
    loss, error, text = LOSS_ERRORS[case]
    learner = Learner()
    with untouched(learner.model, learner.optimizer), pytest.raises(error, match=text):
        call(learner, DATA, loss)
    grow(learner, DATA, cross_entropy)


def test_errors_of_the_user_are_chained() -> None:
    with pytest.raises(InputError) as caught:
        auxin.grow(mlp(5, 3, 3), DATA, raising)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("held_out", [[], 3, [(spoiled(float("nan")), Y)], [(X[:, :2], Y)]])
def test_held_out_batches(held_out: Any) -> None:
    learner = Learner()
    grower = auxin.Grower(learner.model, cross_entropy, optimizer=learner.optimizer, policy=auxin.Policy(smallest=1))
    with untouched(learner.model, learner.optimizer):
        with pytest.raises(AuxinError, match=r"accepted|clean|raised"):
            auxin.grow(learner.model, DATA, cross_entropy, held_out=held_out)
        with pytest.raises(AuxinError, match=r"accepted|clean|raised"):
            grower.step(DATA, held_out=held_out)
    assert grower.state_dict()["calls"] == 0


OPTION_ERRORS: dict[str, tuple[dict[str, Any], type[AuxinError], str]] = {
    "site": ({"sites": ["O"]}, UnknownNameError, "unknown site 'O'; did you mean '0'"),
    "sites number": ({"sites": 3}, InputError, "sites is 3; accepted: what find_sites gave"),
    "site number": ({"sites": [0]}, InputError, r"sites is \[0\]; accepted"),
    "no names": ({"sites": []}, InputError, r"sites is \[\]; accepted"),
    "method": ({"method": "tinny"}, UnknownNameError, "unknown method 'tinny'; did you mean 'tiny'"),
    "method class": ({"method": auxin.Tiny}, InputError, "method is .*Tiny.*; accepted: a name"),
    "negative": ({"neurons": -1}, InputError, "neurons for '0' is -1; accepted: a whole number"),
    "fraction": ({"neurons": 1.5}, InputError, "is 1.5; accepted"),
    "text": ({"neurons": "3"}, InputError, "is '3'; accepted"),
    "bool": ({"neurons": True}, InputError, "is True; accepted"),
    "misspelt auto": ({"neurons": "atuo"}, InputError, "is 'atuo'; accepted.*'auto'"),
    "list": ({"neurons": [1, 2]}, InputError, "accepted: a whole number"),
    "dict site": ({"neurons": {"1": 2}}, UnknownNameError, "unknown site '1'; did you mean '0'"),
    "dict number": ({"neurons": {"0": -2}}, InputError, "neurons for '0' is -2"),
    "empty dict": ({"neurons": {}}, InputError, "an empty dict.*accepted"),
    "nothing to do": ({"neurons": 0}, InputError, "moves no old weights.*auxin.Tiny"),
    "nothing": ({"neurons": 0, "method": auxin.Tiny(best_update=False)}, InputError, "does nothing; accepted"),
    "amplitude nan": ({"amplitude": float("nan")}, InputError, "amplitude is nan; accepted: None"),
    "amplitude text": ({"amplitude": "1"}, InputError, "amplitude is '1'; accepted"),
    "samples": ({"samples": 0}, InputError, "samples=0; accepted: a whole number of at least 1"),
    "samples text": ({"samples": "9"}, InputError, "samples='9'; accepted"),
    "optimizer text": ({"optimizer": "adam"}, OptimizerError, "str is not a torch.optim.Optimizer; pass"),
    "optimizer class": ({"optimizer": torch.optim.SGD}, OptimizerError, "is not a torch.optim.Optimizer"),
    "budget": (
        {"neurons": auxin.Budget(parameters=9), "method": "random"}, InputError, "this method has none; pass numbers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OPTION_ERRORS)
def test_options_of_grow(case: str) -> None:
    options, error, text = OPTION_ERRORS[case]
    learner = Learner()
    given = {"optimizer": learner.optimizer, **options}
    with untouched(learner.model, learner.optimizer), pytest.raises(error, match=text):
        auxin.grow(learner.model, DATA, cross_entropy, **given)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"neurons": "slak"}, "neurons='slak'; did you mean 'slack'?.*'auto'"),
        ({"neurons": -1}, "neurons.*=-1; accepted: a whole number"),
        ({"neurons": 1.5}, "=1.5; accepted"),
        ({"neurons": True}, "=True; accepted"),
        ({"neurons": {"0": "2"}}, "neurons for '0'.*='2'; accepted"),
        ({"schedule": 5}, "schedule=5; accepted: a list of calls"),
        ({"schedule": [0]}, "call of the schedule=0; accepted"),
        ({"every": 0}, "every=0; accepted: a whole number of at least 1"),
        ({"every": None}, "every=None; accepted"),
        ({"better": "hihger"}, "did you mean 'higher'?"),
        ({"margin": float("nan")}, "margin=nan; accepted"),
        ({"share_rise": -0.1}, "share_rise=-0.1; accepted"),
        ({"rho": "0.1"}, "rho='0.1'; accepted"),
        ({"errors": -1}, "errors=-1; accepted"),
        ({"until": 1.5}, "until=1.5; accepted: a share"),
        ({"largest": 0}, "largest=0; accepted"),
        ({"parameters": 1e6}, "parameters=1000000.0; accepted: a whole"),
    ],
)
def test_policy(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        auxin.Policy(**options)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: auxin.Tiny(normalisation="fixd"), "normalisation='fixd'; did you mean 'fixed'?.*None"),
        (lambda: auxin.Tiny(zero="fanin"), "zero='fanin'; did you mean 'fan_in'?"),
        (lambda: auxin.Tiny(damping=-1.0), "damping=-1.0; accepted: a finite number of at least 0"),
        (lambda: auxin.Sprout(damping="x"), "damping='x'; accepted"),
        (lambda: auxin.Sprout(largest=float("nan")), "largest=nan; accepted"),
        (lambda: auxin.GradMax(norm="lin"), "norm='lin'; did you mean 'linear'?"),
        (lambda: auxin.Random(distribution="gauss"), "distribution='gauss'; accepted: 'normal', 'uniform'"),
        (lambda: auxin.Budget(), "limits nothing; accepted: parameters="),
        (lambda: auxin.Budget(parameters=-1), "parameters=-1; accepted"),
        (lambda: auxin.Budget(multiply_adds=True), "multiply_adds=True; accepted"),
    ],
)
def test_options_of_methods_and_budgets(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        make()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"policy": "slack"}, InputError, r"policy is 'slack'; accepted: auxin.Policy\(...\)"),
        ({"method": "sprut"}, UnknownNameError, "did you mean 'sprout'"),
        ({"optimizer": 3}, OptimizerError, "int is not a torch.optim.Optimizer"),
        ({"sites": 3}, InputError, "sites is 3; accepted"),
    ],
)
def test_grower_options(options: dict[str, Any], error: type[AuxinError], text: str) -> None:
    with pytest.raises(error, match=text):
        auxin.Grower(mlp(5, 3, 3), cross_entropy, **options)


@pytest.mark.parametrize("metric", [None, float("nan"), "low"])
def test_metric(metric: Any) -> None:
    learner = Learner()
    grower = auxin.Grower(learner.model, cross_entropy, policy=auxin.Policy(neurons=1, patience=1))
    before = grower.state_dict()
    with untouched(learner.model), pytest.raises(InputError, match=r"metric.*(pass|accepted)"):
        grower.step(DATA, metric)
    assert grower.state_dict() == before


@pytest.mark.parametrize(
    "state", [{}, 3, {"calls": 1, "history": "{}"}, {"steps": 1, "history": auxin.History().to_json()}]
)
def test_state_of_a_grower(state: Any) -> None:
    grower = auxin.Grower(mlp(5, 3, 3), cross_entropy, policy=OPEN)
    before = grower.state_dict()
    with pytest.raises(CheckpointError, match=r"not a (state|history)"):
        grower.load_state_dict(state)
    assert grower.state_dict() == before


@pytest.mark.parametrize("damping", [-1.0, float("nan"), "0.1", True])
def test_damping_of_diagnose(damping: Any) -> None:
    learner = Learner()
    with untouched(learner.model), pytest.raises(InputError, match=r"damping=.*; accepted"):
        auxin.diagnose(learner.model, DATA, cross_entropy, damping=damping)


@pytest.mark.parametrize("model", [3, nn.Linear, lambda x: x])
def test_no_module(model: Any) -> None:
    for call in (
        lambda: auxin.grow(model, DATA, cross_entropy),
        lambda: auxin.diagnose(model, DATA, cross_entropy),
        lambda: auxin.find_sites(model, X),
        lambda: auxin.Grower(model, cross_entropy),
    ):
        with pytest.raises(InputError, match=r"model is .*; accepted: a torch.nn.Module"):
            call()


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(5, 3)), nn.ReLU(), nn.Sequential()])
def test_no_site(model: nn.Module) -> None:
    for call in (auxin.grow, auxin.diagnose):
        with untouched(model), pytest.raises(NoSiteError, match=r"no site that can grow:\n  0: it is|no parameters"):
            call(model, DATA, cross_entropy)


def test_no_example() -> None:
    for example in (3, None, "text", X[:0]):
        with pytest.raises(InputError, match="pass one batch's input"):
            auxin.find_sites(mlp(5, 3, 3), example)


def test_meta_model() -> None:
    for data in (DATA, [(X.to("meta"), Y.to("meta"))]):
        for call in (auxin.grow, auxin.diagnose):
            with pytest.raises(InputError, match=r"the model is on (the )?meta.*(move|give)"):
                call(mlp(5, 3, 3).to("meta"), data, cross_entropy)


def test_frozen_parameters() -> None:
    learner = Learner()
    learner.model.requires_grad_(False)
    grower = auxin.Grower(learner.model, cross_entropy, optimizer=learner.optimizer, policy=OPEN)
    for call in (grower.step, lambda data: auxin.grow(learner.model, data, cross_entropy)):
        match = r"0.weight requires no gradient.*unfreeze"
        with untouched(learner.model, learner.optimizer), pytest.raises(InputError, match=match):
            call(DATA)


def test_frozen_sites_are_left_out_unless_named() -> None:
    learner = Learner(5, 3, 4, 3)
    learner.model[0].requires_grad_(False)
    with untouched(learner.model), pytest.raises(InputError, match=r"0.weight requires no gradient.*sites="):
        auxin.grow(learner.model, DATA, cross_entropy, sites=["0"], neurons=1)
    with untouched(learner.model), pytest.raises(InputError, match=r"0.weight requires no gradient"):
        auxin.grow(learner.model, DATA, cross_entropy, neurons={"0": 1})
    growth = auxin.grow(learner.model, DATA, cross_entropy, optimizer=learner.optimizer, neurons=1)
    assert [record.site for record in growth] == ["2"]


def test_a_grower_grows_what_was_unfrozen_later() -> None:
    model = mlp(5, 3, 4, 3)
    model[0].requires_grad_(False)
    grower = auxin.Grower(model, cross_entropy, policy=OPEN)
    looked_at: list[list[str]] = []
    for trained_at in (False, True):
        model[0].requires_grad_(trained_at)
        planned, _ = grower._opportunity(DATA, None)
        looked_at.append([record.site for record in planned])
    assert looked_at == [["2"], ["0", "2"]]


def test_every_site_frozen() -> None:
    learner = Learner(5, 3, 4, 3)
    learner.model.requires_grad_(False)
    with untouched(learner.model), pytest.raises(InputError, match=r"no site can learn.*unfreeze"):
        auxin.grow(learner.model, DATA, cross_entropy)


class Unknown(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda model: torch.optim.SGD(mlp(5, 3, 3).parameters(), lr=0.1), "holds no parameter of this model; build"),
        (lambda model: torch.optim.SGD(model[0].parameters(), lr=0.1), "no optimizer holds 2.weight.*add_param_group"),
        (lambda model: Unknown(model.parameters()), "the state of Unknown is not known.*register"),
        (lambda model: torch.optim.LBFGS(model.parameters()), "the state of LBFGS is not known.*Adam"),
        (lambda model: list(model.parameters()), "Parameter is not a torch.optim.Optimizer"),
    ],
)
def test_optimizers(make: Callable[[nn.Module], Any], text: str) -> None:
    learner = Learner()
    optimizer = make(learner.model)
    with untouched(learner.model, learner.optimizer):
        with pytest.raises(OptimizerError, match=text):
            auxin.grow(learner.model, DATA, cross_entropy, optimizer=optimizer, neurons=1)
        with pytest.raises(OptimizerError, match=text):
            auxin.Grower(learner.model, cross_entropy, optimizer=optimizer, policy=OPEN).step(DATA)


def replaced(name: int, module: nn.Module) -> Callable[[nn.Module], None]:
    return lambda model: model.__setitem__(name, module)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "wider producer": replaced(0, nn.Linear(5, 4)),
    "wider consumer": replaced(2, nn.Linear(4, 3)),
    "other class": replaced(2, nn.Identity()),
    "activation": replaced(1, nn.LayerNorm(3)),
    "deleted": lambda model: model.__delitem__(2),
    "weight by hand": lambda model: setattr(model[0], "weight", nn.Parameter(torch.zeros(4, 5))),
    "bias gone": lambda model: setattr(model[0], "bias", None),
    "weight norm": lambda model: nn.utils.parametrizations.weight_norm(model[0]),
    "pruned": lambda model: torch.nn.utils.prune.l1_unstructured(model[0], "weight", 0.3),
    "number": lambda model: setattr(model[0], "out_features", 4),
}


@pytest.mark.parametrize("case", CHANGES)
def test_model_changed_since_its_sites_were_found(case: str) -> None:
    model = mlp(5, 3, 3)
    sites = auxin.find_sites(model, X)
    CHANGES[case](model)
    calls: list[Callable[[], Any]] = [
        lambda: auxin.grow(model, DATA, cross_entropy, neurons=1, sites=sites),
        lambda: auxin.diagnose(model, DATA, cross_entropy, sites=sites),
        lambda: auxin.Grower(model, cross_entropy, sites=sites, policy=OPEN).step(DATA),
    ]
    for call in calls:
        with untouched(model), pytest.raises(ModelChangedError, match=r"has changed since.*call find_sites"):
            call()


def test_sites_survive_our_growth_and_a_consistent_change() -> None:
    model = mlp(5, 3, 3)
    sites = auxin.find_sites(model, X)
    auxin.grow(model, DATA, cross_entropy, neurons=2, sites=sites)
    auxin.grow(model, DATA, cross_entropy, neurons=1, sites=sites)
    assert sites[0].width == 6
    model[0], model[2] = nn.Linear(5, 4), nn.Linear(4, 3)
    auxin.grow(model, DATA, cross_entropy, neurons=1, sites=sites)
    assert sites[0].width == 5


def test_sites_of_another_model() -> None:
    model, sites = mlp(5, 3, 3), auxin.find_sites(mlp(5, 3, 3), X)
    with untouched(model), pytest.raises(InputError, match="belongs to another model; call find_sites"):
        auxin.grow(model, DATA, cross_entropy, sites=sites)


def test_a_grower_searches_again_what_it_found_itself() -> None:
    model = mlp(5, 3, 3)
    grower = auxin.Grower(model, cross_entropy, policy=OPEN)
    grower.step(DATA)
    width = model[0].out_features
    model[1] = nn.Sequential(nn.Linear(width, 1), nn.ReLU(), nn.Linear(1, width))
    assert {record.site for record in grower.step(batches(5, seed=6))} == {"0", "1.0", "1.2"}


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def refused(model: nn.Module, path: Path, text: str) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: auxin.grow(model, DATA, cross_entropy),
        lambda: auxin.diagnose(model, DATA, cross_entropy),
        lambda: auxin.find_sites(model, X),
        lambda: auxin.Grower(model, cross_entropy),
        lambda: auxin.save(path, model, auxin.History()),
        lambda: auxin.load(path, model),
    ]
    for call in calls:
        with untouched(model), pytest.raises(WrapperError, match=f"{text}.*pass the plain module.*wrap that anew"):
            call()
    assert not path.exists()


@pytest.mark.usefixtures("process_group")
def test_distributed_wrapper(tmp_path: Path) -> None:
    refused(nn.parallel.DistributedDataParallel(mlp(5, 3, 3)), tmp_path / "f", "the model is a DistributedDataParallel")


def test_parallel_wrapper(tmp_path: Path) -> None:
    refused(nn.DataParallel(mlp(5, 3, 3)), tmp_path / "f", "the model is a DataParallel")
    refused(nn.Sequential(nn.DataParallel(mlp(5, 3, 3))), tmp_path / "f", "the submodule '0' is a DataParallel")


def compiled_whole(model: Any) -> nn.Module:
    return torch.compile(model, backend="eager")


def compiled_in_place(model: Any) -> nn.Module:
    model.compile(backend="eager")
    return model


def compiled_inside(model: Any) -> nn.Module:
    model[0] = torch.compile(model[0], backend="eager")
    return model


@pytest.mark.parametrize("wrap", [compiled_whole, compiled_in_place, compiled_inside])
def test_compiled_models_are_handled(wrap: Callable[[nn.Module], nn.Module]) -> None:
    plain, model = mlp(5, 3, 3), wrap(mlp(5, 3, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    trained(model, DATA, optimizer, steps=1)
    trained(plain, DATA, torch.optim.Adam(plain.parameters(), lr=0.01), steps=1)
    report = auxin.diagnose(model, DATA, cross_entropy)
    assert report.rows[0].bottleneck == pytest.approx(auxin.diagnose(plain, DATA, cross_entropy).rows[0].bottleneck)
    assert auxin.grow(model, DATA, cross_entropy, optimizer=optimizer, neurons=1).added == 1
    trained(model, DATA, optimizer, steps=1)
    assert auxin.find_sites(model, X)[0].width == 4
    assert model(X).shape == (24, 3)


def test_fewer_rows_than_features_is_a_note() -> None:
    model = mlp(40, 6, 3)
    data = batches(40, count=1, size=20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        growth = auxin.grow(model, data, cross_entropy, neurons=2)
    assert [note for note in growth.notes if "10 rows for 41 features; give at least 41 samples" in note]
    report = auxin.diagnose(model, data, cross_entropy)
    assert "20 rows for 41 features; give at least 41 samples" in " ".join(report.notes)
    assert "note: 0: 20 rows" in str(report)
    assert auxin.diagnose(model, batches(40, size=30), cross_entropy).notes == ()


def test_history_of_something_else(tmp_path: Path) -> None:
    model = mlp(5, 3, 3)
    for history in (3, [3], None):
        with pytest.raises(AuxinError, match="accepted: a History"):
            auxin.save(tmp_path / "f", model, history)
    with pytest.raises(UnknownNameError, match="unknown site 'zero'"):
        auxin.grow(model, DATA, cross_entropy, neurons=1)["zero"]
    for text in ("", "[]", "null", '{"format": 1}', '{"format": 9, "events": []}', '{"format": 1, "events": [3]}'):
        with pytest.raises(CheckpointError, match=r"not a history|format 9"):
            auxin.History.from_json(text)
    with pytest.raises(CheckpointError, match="cannot load"):
        auxin.load(os.devnull, model)


def data_that_breaks() -> Iterator[Batch]:
    yield DATA[0]
    raise ConnectionError("the disk is gone")


def test_batches_that_break_off() -> None:
    learner = Learner()
    for call in (grow, step, diagnose):
        with untouched(learner.model, learner.optimizer), pytest.raises(ConnectionError, match="the disk is gone"):
            call(learner, data_that_breaks(), cross_entropy)
