"""The command line: what it takes, what it prints where, and its exit codes."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from auxin import __version__, cli, cli_diagnose
from auxin.cli_diagnose import load_target, split_target
from auxin.errors import InputError, UnknownNameError

SRC = Path(__file__).resolve().parent.parent / "src"
MODEL = """
import torch
from torch import nn

def parts():
    torch.manual_seed(0)
    x = torch.randn(64, 5)
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(5, 2), nn.Tanh(), nn.Linear(2, 2))
    return model, list(zip(x.split(16), y.split(16))), nn.CrossEntropyLoss()
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Writes a target file in a folder that Python can import from, and leaves no trace in the interpreter."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    monkeypatch.chdir(tmp_path)

    def write_file(text: str, name: str = "given.py") -> str:
        (tmp_path / name).write_text(MODEL + text)
        return name

    return write_file


def auxin(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`auxin` in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    command = [sys.executable, "-m", "auxin", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=environment)


# What a target may be


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("train.py", ("train.py", "")),
        ("train.py:model", ("train.py", "model")),
        ("package.module:function", ("package.module", "function")),
        ("package.module", ("package.module", "")),
        ("C:\\train.py", ("C:\\train.py", "")),
        ("C:\\train.py:model", ("C:\\train.py", "model")),
    ],
)
def test_target_is_split_at_its_function(text: str, parts: tuple[str, str]) -> None:
    assert split_target(text) == parts


@pytest.mark.parametrize(
    "body",
    [
        "def target(): return parts()",
        "def target(): return list(parts())",
        "def target(): m, b, l = parts(); return {'model': m, 'batches': b, 'loss': l}",
        "def target(): m, b, l = parts(); return {'model': m, 'data': b, 'loss': l, 'comment': 'more is fine'}",
        "model, batches, loss = parts()",
        "model, data, loss = parts()",
    ],
)
def test_accepted_targets(write: Callable[..., str], body: str) -> None:
    target = load_target(write(body))
    assert type(target.model).__name__ == "Sequential"
    assert len(list(target.batches)) == 4
    assert callable(target.loss)


@pytest.mark.parametrize("text", ["given.py:other", "given:other"])
def test_target_names_its_function(write: Callable[..., str], text: str) -> None:
    write("def target(): raise RuntimeError\ndef other(): return parts()")
    assert len(list(load_target(text).batches)) == 4


def test_module_in_the_current_folder_is_found(write: Callable[..., str]) -> None:
    write("def target(): return parts()", "lying_here.py")
    assert len(list(load_target("lying_here").batches)) == 4


def test_file_finds_its_neighbours(write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("", "neighbour.py")
    write("from neighbour import parts as found\ndef target(): return found()")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert len(list(load_target("../given.py").batches)) == 4


def test_file_named_as_a_loaded_module_does_not_replace_it(write: Callable[..., str]) -> None:
    load_target(write("def target(): return parts()", "json.py"))
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def target(): return parts()[:2]", ["2 entries", "(model, batches, loss)"]),
        ("def target(): return 3", ["is int", "(model, batches, loss)"]),
        ("def target(): return {'model': parts()[0], 'loss': parts()[2]}", ["lack batches", "or data"]),
        ("def target(): return 'model', *parts()[1:]", ["model", "is str", "torch.nn.Module"]),
        ("def target(): return parts()[0], 5, parts()[2]", ["batches", "are int", "iterable"]),
        ("target = 5", ["`target`", "is int", "not a function"]),
        ("model = parts()[0]", ["no function `target`", "lack batches, loss"]),
        ("def target(): return 1 / 0", ["given.py raised ZeroDivisionError", "division by zero", "--traceback"]),
        ("raise SystemExit(3)", ["given.py raised SystemExit: 3"]),
        ("import no_such_module", ["given.py raised ModuleNotFoundError", "no_such_module"]),
        ("def target(:", ["given.py raised SyntaxError"]),
    ],
)
def test_refused_targets_say_why(write: Callable[..., str], body: str, said: list[str]) -> None:
    with pytest.raises(InputError) as error:
        load_target(write(body))
    assert [part for part in said if part not in str(error.value)] == []


def test_missing_file_and_missing_function(write: Callable[..., str]) -> None:
    with pytest.raises(InputError, match=r"no file absent\.py.*file\.py:function or module:function"):
        load_target("absent.py")
    with pytest.raises(UnknownNameError, match=r"unknown function in given\.py 'tagret'; did you mean 'target'"):
        load_target(write("def target(): return parts()") + ":tagret")


# What is printed where


def run_with(monkeypatch: pytest.MonkeyPatch, command: Callable[..., Mapping[str, Any]], *arguments: str) -> int:
    """`auxin diagnose` with `command` in the place of the real one."""
    monkeypatch.setattr(cli_diagnose, "run", command)
    return cli.main(["diagnose", "x.py", *arguments])


def test_json_is_the_only_output(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def command(options: Namespace, console: Console) -> Mapping[str, Any]:
        console.print("a table")
        print("a user's print")
        subprocess.run(["echo", "a subprocess"], check=True)
        return {"fine": 1.5, "nested": [float("nan"), {"inf": float("inf")}], 3: (1, None, True)}

    assert run_with(monkeypatch, command, "--json") == 0
    out, err = capfd.readouterr()
    assert json.loads(out) == {"fine": 1.5, "nested": [None, {"inf": None}], "3": [1, None, True]}
    assert all(text in err for text in ("a table", "a user's print", "a subprocess"))


def test_standard_output_is_back_after_an_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def command(options: Namespace, console: Console) -> Mapping[str, Any]:
        raise InputError("given 3; accepted is 4")

    assert run_with(monkeypatch, command, "--json") == 2
    subprocess.run(["echo", "after"], check=True)
    assert capfd.readouterr() == ("after\n", "auxin: given 3; accepted is 4\n")


def test_traceback_on_demand(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def command(options: Namespace, console: Console) -> Mapping[str, Any]:
        raise InputError("given 3; accepted is 4")

    assert run_with(monkeypatch, command, "--traceback") == 2
    assert "Traceback" in capsys.readouterr().err


def test_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def command(options: Namespace, console: Console) -> Mapping[str, Any]:
        raise KeyboardInterrupt

    assert run_with(monkeypatch, command) == 130
    assert capsys.readouterr().err == "auxin: interrupted\n"


def test_our_own_mistakes_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(options: Namespace, console: Console) -> Mapping[str, Any]:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        run_with(monkeypatch, command)


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--help"])
    assert exit_.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "demo grow a network" in text
    assert "diagnose show which layers hold a model back" in text


@pytest.mark.parametrize(
    "arguments",
    [[], ["nothing"], ["diagnose"], ["diagnose", "x.py", "--batches", "0"], ["diagnose", "x.py", "--damping", "much"]],
)
def test_bad_arguments_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert "usage: auxin" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"auxin {__version__}\n"


# The commands themselves


def test_diagnose_prints_a_table(write: Callable[..., str], tmp_path: Path) -> None:
    done = auxin("diagnose", write("def target(): return parts()"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "bottleneck" in done.stdout
    assert "not offered: 2: " in done.stdout


def test_diagnose_json(write: Callable[..., str], tmp_path: Path) -> None:
    noisy = "print('importing')\ndef target(): print('called'); return parts()"
    done = auxin("diagnose", write(noisy), "--json", "--batches", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [row["site"] for row in result["rows"]] == ["0"]
    assert result["samples"] == 32
    assert "importing" in done.stderr


def test_reader_that_goes_away_is_no_error(write: Callable[..., str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "auxin", "diagnose", write("def target(): return parts()"), "--json"]
    # With an unbuffered output nothing would be left to be written when the process ends.
    environment = {**os.environ, "PYTHONPATH": str(SRC), "PYTHONUNBUFFERED": ""}
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path, env=environment
    )
    os.close(writer)
    assert done.returncode == 1
    assert "BrokenPipe" not in done.stderr


def test_diagnose_refuses_in_one_line(write: Callable[..., str], tmp_path: Path) -> None:
    done = auxin("diagnose", write("def target(): return parts()"), "--sites", "5", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("auxin: ")
    assert "Traceback" not in done.stderr


def test_demo_refuses_a_folder_that_is_not_there_before_it_trains(tmp_path: Path) -> None:
    done = auxin("demo", "--report", "absent/page.html", cwd=tmp_path)
    assert done.returncode == 2
    assert "no folder absent" in done.stderr


def test_demo(tmp_path: Path) -> None:
    done = auxin("demo", "--seeds", "1", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [summary["name"] for summary in result["summary"]] == ["grown", "from scratch", "seed"]
    grown, scratch, seed = result["runs"]
    assert min(grown["widths"]) > 1
    assert grown["accuracy"] > seed["accuracy"] + 0.2
    assert scratch["widths"] == grown["widths"]
    assert abs(scratch["flops"] / grown["flops"] - 1) < 0.02
    assert (tmp_path / "auxin-demo.html").read_text().startswith("<!doctype html>")
    assert "→" in done.stderr
