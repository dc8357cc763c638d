"""The command line: it starts without the extras, and says in one line what is wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tierkv
from tierkv import cli
from tierkv.errors import ConfigError

_HEAVY = ("vllm", "torch", "transformers", "matplotlib", "rich", "tqdm", "numba")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"tierkv {tierkv.__version__}\n"


@pytest.mark.parametrize("argv", [["--help"], ["demo", "--help"]])
def test_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 0
    assert "demo" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["no-such-command"], ["demo", "--no-such-option"]])
def test_wrong_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    assert "usage: tierkv" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (ConfigError("field", "two\nlines", "one"), 2, "tierkv: field: two lines; accepted: one\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors(
    error: BaseException, code: int, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr(cli.demo, "run", fail)
    assert cli.main(["demo"]) == code
    assert capsys.readouterr().err == printed


def test_starts_without_the_extras() -> None:
    """As it is where none of them is installed: each import of one would fail."""
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({_HEAVY!r}))\n"
        "from tierkv.cli import make_parser; make_parser().parse_args(['demo', '--quick'])"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["demo"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tierkv: not installed: rich;")
    assert "tierkv[vllm,demo]" in error
