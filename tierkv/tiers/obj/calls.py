"""Calls of the store that end in time: whatever a server does, and when the tier is closed."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from tierkv.errors import TierClosedError

_T = TypeVar("_T")

#: For so long a call that was given up may take to let go of what it was given.
_LET_GO_S = 5.0


class Calls:
    """A thread, ``tierkv-<tier>-http-0``, whose event loop runs the calls of all others.

    Thread safety: any method may be called by any thread but that one.
    """

    def __init__(self, tier: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._open: set[concurrent.futures.Future[Any]] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"tierkv-{tier}-http-0", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads to be had
            self._loop.close()
            raise

    def run(self, call: Coroutine[Any, Any, _T], until: float) -> _T:
        """What ``call`` returns.

        Args:
            until: when to give it up (``time.monotonic``).

        Raises:
            TimeoutError: it was given up. TierClosedError: the tier is being closed. And whatever it raises.
        """
        with self._lock:
            if self._closed:
                call.close()
                raise TierClosedError("closed")
            future = asyncio.run_coroutine_threadsafe(_until(call, until - time.monotonic()), self._loop)
            self._open.add(future)
        try:
            return future.result()
        except (asyncio.CancelledError, concurrent.futures.CancelledError):
            raise TierClosedError("closed") from None
        finally:
            with self._lock:
                self._open.discard(future)

    def stop(self) -> None:
        """Give up all calls, and take no more."""
        with self._lock:
            self._closed = True
            given_up = list(self._open)
        for future in given_up:
            future.cancel()

    def close(self) -> None:
        """End the thread. Nobody runs calls any more."""
        self.stop()
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        finally:
            self._loop.close()


async def _until(call: Coroutine[Any, Any, _T], seconds: float) -> _T:
    try:
        return await asyncio.wait_for(call, max(0.0, seconds))
    except asyncio.TimeoutError:
        raise TimeoutError("given up") from None


def let_go(view: memoryview) -> None:
    """Release ``view``, once the client, which may have been interrupted, does not send from it any more."""
    until = time.monotonic() + _LET_GO_S
    while True:
        try:
            return view.release()
        except BufferError:
            if time.monotonic() > until:
                raise
            time.sleep(0.001)
