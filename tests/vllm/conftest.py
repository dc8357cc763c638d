"""Fixtures of the tests that run a real vLLM engine on the CPU. They are skipped where vLLM is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from vllm_harness import Engines, Oracle, Server

HERE = Path(__file__).parent

# A folder named vllm may be found as a namespace package: only the real one has an origin.
_SPEC = importlib.util.find_spec("vllm")
INSTALLED = _SPEC is not None and _SPEC.origin is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            if not INSTALLED:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))


@pytest.fixture(scope="session")
def _engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    from vllm_harness import Engines

    # A short path: a socket's is limited to 107 bytes.
    started = Engines(tmp_path_factory.mktemp("vllm"))
    yield started
    started.close()


@pytest.fixture
def engines(_engines: Engines) -> Iterator[Engines]:
    """Starts engines; what a test leaves open is closed."""
    yield _engines
    _engines.close_all()


@pytest.fixture(scope="session")
def oracle(_engines: Engines) -> Iterator[Oracle]:
    """Answers of an engine without a connector."""
    from vllm_harness import Oracle

    answers = Oracle(_engines)
    yield answers
    answers.close()


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    """Servers that a test has started, to be killed at its end."""
    started: list[Server] = []
    yield started
    for server in started:
        server.kill()
