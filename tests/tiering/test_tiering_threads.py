"""Who may touch what, and when: the lock is there where it has to be, and no tier is asked while it is held."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from audit import audit
from puppet import PuppetTier, puppet, puppet_of
from tiering_harness import TOKENS, Bench, group, wait_until

from tierkv.host.cache import HostCache
from tierkv.metrics import Metrics


class OwnedLock:
    """A lock that knows whose it is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    @property
    def mine(self) -> bool:
        return self._owner == threading.get_ident()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._owner = None
        self._lock.release()


@pytest.fixture
def locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Managers have a lock that knows its owner."""
    shim = SimpleNamespace(Lock=OwnedLock, Event=threading.Event, Thread=threading.Thread)
    monkeypatch.setattr("tierkv.tiering.manager.threading", shim)


def watch(
    monkeypatch: pytest.MonkeyPatch, kind: type, names: list[str], bench: Bench, locked: bool, found: list[str]
) -> None:
    """Note in ``found`` the calls of ``kind``'s methods ``names`` during which the lock is not as it has to be."""

    def watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            lock: Any = bench.manager._lock
            if lock.mine is not locked:
                found.append(f"{kind.__name__}.{name} by {threading.current_thread().name}")
            return method(self, *args, **kwargs)

        return call

    for name in names:
        monkeypatch.setattr(kind, name, watched(name, getattr(kind, name)))


def test_cache_and_counters_are_used_under_the_lock_and_lookups_are_not(
    locks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.tiering.manager.EXPIRY_S", 0.01)
    groups = [group(0), group(1, "sliding_window", window=2 * TOKENS, page=1000)]
    with Bench(groups, slots=12, tiers=[puppet(), puppet(name="late")], load_timeout_s=0.05, store_timeout_s=0.05) as b:
        found: list[str] = []
        methods = [name for name, value in vars(HostCache).items() if callable(value) and not name.startswith("_")]
        watch(monkeypatch, HostCache, methods, b, True, found)
        watch(monkeypatch, Metrics, ["add", "add_reason", "snapshot"], b, True, found)
        watch(monkeypatch, PuppetTier, ["submit_store", "submit_load", "get_finished_jobs"], b, True, found)
        watch(monkeypatch, PuppetTier, ["lookup_batch", "close"], b, False, found)
        manager, late = b.manager, puppet_of(b, 1)
        late.stores_at_once = False
        manager.grow(b.config.cpu_bytes_to_use)
        b.store("a", 5)
        b.store("a", 5, ok=False)
        wait_until(lambda: manager.counts()["cascades_late"])
        late.stores_at_once = True
        late.do()
        b.settle()
        b.forget_host()
        b.load("a", 5, "r")
        b.forget_host()
        puppet_of(b, 0).loads_at_once = False
        b.boundary("a", 5, "late")
        manager.release("late")
        puppet_of(b, 0).loads_at_once = True
        puppet_of(b, 0).do()
        b.settle()
        assert b.boundary("a", 5, "expires") > 0
        wait_until(lambda: manager.counts()["hits_expired"])
        if b.boundary("a", 5, "failed") and manager.begin_load("failed"):
            manager.finish_load("failed", ok=False)
        for request in ("expires", "failed"):
            manager.finish_request(request)
        manager.invalidate()
        audit(b)
        manager.close()
    assert sorted(set(found)) == []


def test_many_threads_at_once() -> None:
    """The engine's own and others: a rank's report, a reset from outside, an exporter that reads the counters."""
    groups = [group(0), group(1, "sliding_window", window=2 * TOKENS)]
    with Bench(groups, slots=24, tiers=[puppet()]) as bench:
        problems: list[BaseException] = []
        done = threading.Event()

        def repeat(act: Callable[[], Any]) -> Callable[[], None]:
            def loop() -> None:
                try:
                    while not done.is_set():
                        act()
                except BaseException as error:
                    problems.append(error)

            return loop

        def life(text: str) -> Callable[[], Any]:
            def act() -> None:
                if bench.ask(text, 7, f"r{text}") and bench.manager.begin_load(f"r{text}") is not None:
                    bench.manager.finish_load(f"r{text}", ok=True)
                bench.store(text, 7)
                bench.manager.finish_request(f"r{text}")

            return act

        acts: list[Callable[[], Any]] = [*map(life, ("a", "ab", "b", "ba")), bench.manager.counts]
        threads = [threading.Thread(target=repeat(act)) for act in acts]
        for thread in threads:
            thread.start()
        for _ in range(50):
            bench.manager.reset("host")
            done.wait(0.02)
        done.set()
        for thread in threads:
            thread.join(20)
        assert not problems
        bench.assert_at_rest()
        audit(bench)
