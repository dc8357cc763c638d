"""A bucket, or another place of objects, as the tier uses it: calls fail in tierkv's words, and end in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from tierkv.errors import ConfigError, RecordError, RemoteError
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

_T = TypeVar("_T")

#: A large object that is read comes in pieces of about this many bytes.
PIECE_BYTES = 8 << 20
#: Names of objects that a store lists at a time.
PAGE = 1000

_MULTIPART_BYTES = 8 << 20


class Listed(NamedTuple):
    """An object: its name, without the prefix; its size in bytes; and when it was written, in seconds of the epoch."""

    path: str
    nbytes: int
    written_s: float


class Objects:
    """The objects below a prefix, for coroutines. What the client raises is raised as ``client.translated`` says.

    Thread safety: for the thread of one event loop.
    """

    def __init__(self, store: Any, prefix: str, multipart_bytes: int) -> None:
        self._store = store
        self._prefix = prefix
        self._multipart_bytes = multipart_bytes
        self._conditional = True

    async def size(self, path: str) -> int | None:
        """The bytes of an object; None: there is none."""
        try:
            return int((await self._store.head_async(self._name(path)))["size"])
        except FileNotFoundError:
            return None
        except Exception as error:
            raise translated(error) from error

    async def sizes(self, paths: Sequence[str]) -> list[int | None]:
        """The bytes of objects, which are asked for at the same time; None: there is none."""
        found = await asyncio.gather(*map(self.size, paths), return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return found  # type: ignore[return-value]

    async def read(self, path: str, expected: int) -> tuple[int, AsyncIterator[memoryview]]:
        """The bytes of an object, and what is in it, in pieces.

        Args:
            expected: so many bytes it should have. One with more is not read at once.
        """
        try:
            got = await self._store.get_async(self._name(path))
        except Exception as error:
            raise translated(error) from error
        size = int(got.meta["size"])
        return size, _at_once(got) if size <= min(expected, PIECE_BYTES) else _by_pieces(got)

    async def write(self, path: str, parts: Sequence[bytes | memoryview], *, replace: bool) -> bool:
        """Write an object, which appears whole or not at all. The client has let go of ``parts`` afterwards.

        Args:
            replace: also if there is one.

        Returns:
            whether it was written: False: there is one.
        """
        views = [memoryview(part) for part in parts]
        multipart = sum(map(len, views)) > self._multipart_bytes
        kind: dict[str, Any] = {"use_multipart": False, "mode": "create" if self._conditional else "overwrite"}
        if replace:
            kind["mode"] = "overwrite"
        if multipart:  # which have no conditions; who writes has asked before whether there is one
            kind = {"use_multipart": True, "chunk_size": _MULTIPART_BYTES, "max_concurrency": 4}
        try:
            await self._store.put_async(self._name(path), views, **kind)
        except Exception as error:
            if already_exists(error):
                return False
            if not (kind.get("mode") == "create" and knows_no_conditions(error)):
                raise translated(error) from error
            self._conditional = False
            await self._overwrite(path, views)
        finally:
            for view in views:
                await let_go(view)
        return True

    async def _overwrite(self, path: str, views: Sequence[memoryview]) -> None:
        try:
            await self._store.put_async(self._name(path), views, use_multipart=False, mode="overwrite")
        except Exception as error:
            raise translated(error) from error

    async def pages(self, prefix: str) -> AsyncIterator[list[Listed]]:
        """All objects whose names begin with ``prefix``, a whole number of path segments, in pages."""
        skipped = len(self._prefix) + 1 if self._prefix else 0
        try:
            async for found in self._store.list(self._name(prefix), chunk_size=PAGE):
                yield [Listed(o["path"][skipped:], int(o["size"]), o["last_modified"].timestamp()) for o in found]
        except Exception as error:
            raise translated(error) from error

    async def delete(self, paths: Sequence[str]) -> None:
        """Remove objects, whether they are there or not."""
        try:
            await self._store.delete_async([self._name(path) for path in paths])
        except Exception as error:
            raise translated(error) from error

    def _name(self, path: str) -> str:
        return f"{self._prefix}/{path}" if self._prefix else path


async def _at_once(got: Any) -> AsyncIterator[memoryview]:
    try:
        yield memoryview(await got.bytes_async())
    except Exception as error:
        raise translated(error) from error


async def _by_pieces(got: Any) -> AsyncIterator[memoryview]:
    try:
        async for piece in got.stream(min_chunk_size=PIECE_BYTES):
            yield memoryview(piece)
    except Exception as error:
        raise translated(error) from error


class Bucket:
    """A client's objects, and the thread that its calls run on; for other threads, which wait for an answer.

    Thread safety: any method may be called by any thread. Each waits until ``until`` at most (``time.monotonic``), and
    raises what ``Objects`` raises, or TierClosedError.
    """

    def __init__(self, config: ObjTierConfig, tier: str, retry_s: float = 30.0) -> None:
        """
        Args:
            tier: its name, for the thread's.
            retry_s: nothing is tried again after so long.

        Raises:
            ConfigError: a field cannot be used.
        """
        self._config = config
        store, prefix, self.url = open_target(config, retry_s)
        self.objects = Objects(store, prefix, config.multipart_bytes)
        self.calls = Calls(tier)

    def sizes(self, paths: Sequence[str], until: float) -> list[int | None]:
        """As ``Objects.sizes``."""
        return self._run(self.objects.sizes(paths), until)

    def read(self, path: str, until: float, expected: int = PIECE_BYTES) -> tuple[int, Iterator[memoryview]]:
        """As ``Objects.read``. The pieces are read as they are asked for; close the iterator if not all are."""
        size, pieces = self._run(self.objects.read(path, expected), until)
        return size, self._each(pieces, until)

    def write(self, path: str, parts: Sequence[bytes | memoryview], until: float, *, replace: bool) -> bool:
        """As ``Objects.write``."""
        return self._run(self.objects.write(path, parts, replace=replace), until)

    def list(self, prefix: str, until: float) -> Iterator[list[Listed]]:
        """As ``Objects.pages``."""
        return self._each(self.objects.pages(prefix), until)

    def delete(self, paths: Sequence[str], until: float) -> None:
        """As ``Objects.delete``."""
        self._run(self.objects.delete(paths), until)

    def stop(self) -> None:
        """Give up all calls that other threads wait for, and take no more."""
        self.calls.stop()

    def close(self) -> None:
        """End, and close all connections. Nobody else uses it any more."""
        self.calls.close()
        self.__dict__.pop("objects", None)  # connections live as long as the client

    def _run(self, call: Coroutine[Any, Any, _T], until: float) -> _T:
        try:
            return self.calls.run(call, until - time.monotonic())
        except TimeoutError as error:
            raise translated(error) from error

    def _each(self, items: AsyncIterator[_T], until: float) -> Iterator[_T]:
        """What an asynchronous iterator yields, and its end."""

        async def following() -> tuple[_T] | None:
            async for item in items:
                return (item,)
            return None

        while (found := self._run(following(), until)) is not None:
            yield found[0]

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
