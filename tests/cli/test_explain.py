from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tierkv import cli
from tierkv.keys import GroupNamespace, Namespace

GROUP = GroupNamespace(
    kind="full",
    tokens_per_block=16,
    tokens_per_chunk=32,
    window=0,
    layers=("a", "b"),
    pages=("kv[8][16][256]", "kv[8][16][256]"),
    cells=("bfloat16", "bfloat16"),
)
NAMESPACE = Namespace(
    model="m",
    weights="w",
    kv_dtype="auto",
    hash_algorithm="sha256",
    hash_seed="s",
    hash_block_size=16,
    groups=(GROUP, GROUP),
    layout="canonical-1",
)


def write(folder: Path, namespace: Namespace) -> Path:
    folder.mkdir()
    (folder / "namespace.json").write_text(json.dumps(namespace.describe()))
    return folder


def explain(tmp_path: Path, other: Namespace, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    paths = [write(tmp_path / "a", NAMESPACE), write(tmp_path / "b", other) / "namespace.json"]
    code = cli.main(["explain", *map(str, paths), *options])
    return code, capsys.readouterr().out


def test_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = explain(tmp_path, NAMESPACE, capsys)
    assert code == 0 and out.startswith("The same namespace")


@pytest.mark.parametrize(
    ("change", "field", "values"),
    [
        ({"weights": "x"}, "weights", ("w", "x")),
        ({"cache_namespace": "tenant"}, "cache_namespace", ("", "tenant")),
        ({"layout": "topology:tp2"}, "layout", ("canonical-1", "topology:tp2")),
        ({"groups": (GROUP, msgspec.structs.replace(GROUP, window=128))}, "groups[1].window", (0, 128)),
        (
            {"groups": (GROUP, msgspec.structs.replace(GROUP, pages=("kv[8][16][256]", "opaque[2][1][64]")))},
            "groups[1].pages[1]",
            ("kv[8][16][256]", "opaque[2][1][64]"),
        ),
    ],
)
def test_the_field_that_differs_is_named(
    change: dict[str, Any],
    field: str,
    values: tuple[Any, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = msgspec.structs.replace(NAMESPACE, **change)
    assert other.digest != NAMESPACE.digest
    code, out = explain(tmp_path, other, capsys, "--json")
    assert code == 1
    assert [json.loads(line) for line in out.splitlines()] == [{"field": field, "a": values[0], "b": values[1]}]
    assert cli.main(["explain", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert capsys.readouterr().out.startswith(f"{field}:\n  A: {json.dumps(values[0])}\n  B: ")


def test_groups_that_do_not_correspond(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = explain(tmp_path, msgspec.structs.replace(NAMESPACE, groups=(GROUP,)), capsys)
    assert code == 1 and out.startswith("groups:\n")


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot be read"), ("{", "is not JSON"), ("[]", "does not describe a namespace")]
)
def test_what_is_no_namespace(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "namespace.json").write_text(content)
    assert cli.main(["explain", str(tmp_path), str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("tierkv: A: ") and message in err and "accepted: a namespace.json" in err
