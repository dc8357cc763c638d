"""A bucket, or another place of objects, as the tier uses it: each call ends in time, and fails in tierkv's words."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tierkv.errors import ConfigError, RecordError, RemoteError, TierKVError
from tierkv.tiers.io import ABSENT
from tierkv.tiers.obj.calls import Calls, let_go
from tierkv.tiers.obj.client import (
    already_exists,
    knows_no_conditions,
    open_target,
    problem_of,
    translated,
)
from tierkv.tiers.obj.config import ObjTierConfig

#: An object that is read comes in pieces of about this many bytes.
PIECE_BYTES = 4 << 20
#: Names of objects that a store lists at a time.
PAGE = 1000

_MULTIPART_BYTES = 8 << 20


class Listed(NamedTuple):
    """An object: its name, without the prefix; its size in bytes; and when it was written, in seconds of the epoch."""

    path: str
    nbytes: int
    written_s: float


class Bucket:
    """Thread safety: any method may be called by any thread; each waits for the store, until ``until`` at most
    (``time.monotonic``), and raises what ``tierkv.tiers.obj.client.translated`` makes of what the client raises:
    RemoteError, or RecordError (``absent``) of an object that is not there; or TierClosedError."""

    def __init__(self, config: ObjTierConfig, tier: str, retry_s: float = 30.0) -> None:
        """
        Args:
            tier: its name, for the thread's.
            retry_s: nothing is tried again after so long.

        Raises:
            ConfigError: a field cannot be used.
        """
        self._config = config
        self._store, self._prefix, self.url = open_target(config, retry_s)
        self._multipart_bytes = config.multipart_bytes
        self._conditional = True
        self._calls = Calls(tier)

    # ── objects ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def size(self, path: str, until: float) -> int | None:
        """The bytes of an object; None: there is none."""
        return self.sizes([path], until)[0]

    def sizes(self, paths: Sequence[str], until: float) -> list[int | None]:
        """The bytes of objects, which are asked for at the same time; None: there is none."""

        async def one(path: str) -> int | None:
            try:
                return int((await self._store.head_async(self._name(path)))["size"])
            except FileNotFoundError:
                return None

        async def every() -> list[int | None]:
            found = await asyncio.gather(*map(one, paths), return_exceptions=True)
            for each in found:
                if isinstance(each, BaseException):
                    raise each
            return found  # type: ignore[return-value]

        found: list[int | None] = self._run(every(), until)
        return found

    def read(self, path: str, until: float) -> tuple[int, Iterator[memoryview]]:
        """The bytes of an object, and what is in it, in pieces. The pieces are read as they are asked for."""

        async def begin() -> tuple[int, Any, Any]:
            got = await self._store.get_async(self._name(path))
            stream = got.stream(min_chunk_size=PIECE_BYTES)
            return int(got.meta["size"]), stream, await anext(stream, None)

        async def go_on(stream: Any) -> Any:
            return await anext(stream, None)

        size, stream, first = self._run(begin(), until)

        def pieces() -> Iterator[memoryview]:
            piece = first
            while piece is not None:
                yield memoryview(piece)
                piece = self._run(go_on(stream), until)

        return size, pieces()

    def write(self, path: str, parts: Sequence[bytes | memoryview], until: float, *, replace: bool) -> bool:
        """Write an object, which appears whole or not at all. The store has let go of ``parts`` afterwards.

        Args:
            replace: also if there is one.

        Returns:
            whether it was written: False: there is one.
        """
        views = [memoryview(part) for part in parts]
        multipart = sum(map(len, views)) > self._multipart_bytes

        async def put(mode: str) -> None:
            kind: dict[str, Any] = {"use_multipart": False, "mode": mode}
            if multipart:  # which have no conditions; who writes has asked before whether there is one
                kind = {"use_multipart": True, "chunk_size": _MULTIPART_BYTES, "max_concurrency": 4}
            await self._store.put_async(self._name(path), views, **kind)

        try:
            if replace or not self._conditional:
                self._run(put("overwrite"), until)
                return True
            try:
                self._run(put("create"), until, raw=True)
            except TierKVError:
                raise
            except Exception as error:
                if already_exists(error):
                    return False
                if not knows_no_conditions(error):
                    raise translated(error) from error
                self._conditional = False
                self._run(put("overwrite"), until)
            return True
        finally:
            for view in views:
                let_go(view)

    def list(self, prefix: str, until: float) -> Iterator[list[Listed]]:
        """All objects whose names begin with ``prefix``, a whole number of path segments, in pages."""
        stream = self._store.list(self._name(prefix), chunk_size=PAGE)
        skipped = len(self._prefix) + 1 if self._prefix else 0

        async def page() -> Any:
            return await anext(stream, None)

        while (found := self._run(page(), until)) is not None:
            yield [Listed(o["path"][skipped:], int(o["size"]), o["last_modified"].timestamp()) for o in found]

    def delete(self, paths: Sequence[str], until: float) -> None:
        """Remove objects, whether they are there or not."""

        async def go() -> None:
            await self._store.delete_async([self._name(path) for path in paths])

        self._run(go(), until)

    def stop(self) -> None:
        """Give up all calls, and take no more."""
        self._calls.stop()

    def close(self) -> None:
        """End, and close all connections. Nobody else uses it any more."""
        self._calls.close()
        self.__dict__.pop("_store", None)  # connections live as long as the client

    # ── at start ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def check(self, directory: str, description: tuple[str, bytes] | None, until: float) -> None:
        """See that the bucket is there, and that this process may list, read and, unless it is only to read, write.

        Args:
            directory: to be listed.
            description: name and content of an object that is to be there; None: nothing is written.

        Raises:
            ConfigError: something is not so; says what, and names the field.
        """
        step = "list"
        try:
            next(self.list(directory, until), None)
            step = "read"
            path, text = description if description is not None else (f"{directory}/none", b"")
            found = self._content(path, until)
            if description is not None:
                step = "write"
                self.write(path, [text], until, replace=found is not None and found != text)
        except (RemoteError, RecordError) as error:
            raise self._refusal(step, error) from error

    def _content(self, path: str, until: float) -> bytes | None:
        """A small object; None: there is none."""
        try:
            return b"".join(map(bytes, self.read(path, until)[1]))
        except RecordError:
            return None

    def _refusal(self, step: str, error: Exception) -> ConfigError:
        """``error``, which came up when ``step`` was tried, as one of the configuration."""
        cause = error.__cause__
        problem = problem_of(cause if cause is not None else error)
        field, config = problem.field, self._config
        where = f"{config.store.endpoint_override} " if config.store.endpoint_override else ""
        if problem.reason == ABSENT:
            field, problem = "bucket", problem._replace(detail=f"there is none ({problem.detail})")
        elif problem.reason == "forbidden" and field == "access_key" and step != "list":
            field, problem = "bucket", problem._replace(detail=f"no permission ({problem.detail})")
        accepted = {
            "bucket": "a bucket that is there, and may be listed, read and, unless mode is read, written",
            "endpoint_override": "the URL of a server that answers",
            "access_key": "keys of a user of the store who may use the bucket",
            "secret_key": "the secret of access_key",
            "session_token": "one that is valid",
            "region": "the region of the bucket",
            "ca_bundle": "a file with the certificate (PEM) that the server's is signed with",
        }.get(field, "a store that answers")
        if field not in type(config.store).__struct_fields__:
            field = "url" if config.url else f"{config.at}endpoint_override"
        elif config.url and field == "bucket":
            field = "url"
        else:
            field = f"{config.at}{field}"
        return ConfigError(field, f"cannot {step} {where}{self.url}: {problem.detail}", accepted)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _name(self, path: str) -> str:
        return f"{self._prefix}/{path}" if self._prefix else path

    def _run(self, call: Any, until: float, raw: bool = False) -> Any:
        try:
            if time.monotonic() >= until:
                call.close()
                raise TimeoutError(errno.ETIMEDOUT, "nobody waits for it any more")
            return self._calls.run(call, until)
        except TierKVError:
            raise
        except Exception as error:
            if raw:
                raise
            raise translated(error) from error
