"""A bucket, or another place of objects, as the tier uses it: calls fail in tierkv's words, and end in time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from tierkv.errors import ConfigError, RecordError, RemoteError, TierKVError
from tierkv.tiers.obj.calls import Calls, let_go
from tierkv.tiers.obj.client import (
    CallError,
    Problem,
    already_exists,
    forget_frames,
    knows_no_conditions,
    open_target,
    translated,
)
from tierkv.tiers.obj.config import ObjTierConfig

_T = TypeVar("_T")

#: An object of at most so many bytes is read at once; a larger one in pieces: who makes one has the interpreter.
_AT_ONCE_BYTES, _PIECE_BYTES = 16 << 20, 512 << 10
#: Names of objects that the client hands over at a time, for the same reason. (Stores send a thousand.)
_NAMES = 100
#: A large object is sent in parts of so many bytes, so many at the same time.
_PART_BYTES, _PARTS = 8 << 20, 4
#: What was not read to its end is let go of within so many seconds.
_CLOSE_S = 1.0


class Found(NamedTuple):
    """An object that is there: its name, without the prefix; its size in bytes; when it was written, in seconds of the
    epoch; and a text that another object of that name would not have, if the store has such a thing."""

    path: str
    nbytes: int
    written_s: float
    e_tag: str | None


class Objects:
    """The objects below a prefix, for coroutines. What the client raises is raised as ``client.translated`` says.

    Thread safety: for the thread of one event loop.
    """

    def __init__(self, store: Any, prefix: str, multipart_bytes: int) -> None:
        self._store = store
        self._prefix = prefix
        self._multipart_bytes = multipart_bytes
        self._conditional = True

    async def find(self, path: str) -> Found | None:
        """The object, if it is there."""
        try:
            return self._found(await self._store.head_async(self._name(path)))
        except FileNotFoundError as error:
            forget_frames(error)
            return None
        except Exception as error:
            raise translated(error) from None

    async def find_all(self, paths: Sequence[str]) -> list[Found | None]:
        """Which objects are there; they are asked for at the same time."""
        found = await asyncio.gather(*map(self.find, paths), return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return found  # type: ignore[return-value]

    async def read(self, path: str, expected: int) -> tuple[Found, AsyncGenerator[memoryview, None]]:
        """An object, and what is in it, in pieces; to be closed if not all are taken.

        Args:
            expected: so many bytes it should have. One with more is not read at once.
        """
        try:
            got = await self._store.get_async(self._name(path))
        except Exception as error:
            raise translated(error) from None
        found = self._found(got.meta)
        return found, _at_once(got) if found.nbytes <= min(expected, _AT_ONCE_BYTES) else _by_pieces(got)

    async def write(self, path: str, parts: Sequence[bytes | memoryview], *, replace: bool) -> bool:
        """Write an object, which appears whole or not at all. The client has let go of ``parts`` afterwards.

        Args:
            replace: also if there is one.

        Returns:
            whether it was written: False: there was one. Its size may not be that of ``parts``; and some stores say
            so of one that is just being written, or removed.
        """
        views = [memoryview(part) for part in parts]
        # In several parts there are no conditions; who writes has asked before whether there is one.
        multipart = sum(map(len, views)) > self._multipart_bytes
        conditional = self._conditional and not replace and not multipart
        try:
            try:
                await self._put(path, views, multipart=multipart, conditional=conditional)
            except Exception as error:
                forget_frames(error)
                if conditional and already_exists(error):
                    return False
                if not (conditional and knows_no_conditions(error)):
                    raise _not_written(error) from None
            else:
                return True
            self._conditional = False
            try:
                await self._put(path, views, multipart=False, conditional=False)
            except Exception as error:
                raise _not_written(error) from None
            return True
        finally:
            for view in views:
                await let_go(view)

    async def _put(self, path: str, views: Sequence[memoryview], *, multipart: bool, conditional: bool) -> None:
        name = self._name(path)
        if multipart:
            await self._store.put_async(name, views, use_multipart=True, chunk_size=_PART_BYTES, max_concurrency=_PARTS)
        else:
            mode = "create" if conditional else "overwrite"
            await self._store.put_async(name, views, use_multipart=False, mode=mode)

    async def pages(self, prefix: str) -> AsyncGenerator[list[Found], None]:
        """All objects whose names begin with ``prefix``, a whole number of path segments, in pages."""
        try:
            async for page in _items(self._store.list(self._name(prefix), chunk_size=_NAMES)):
                yield [self._found(each) for each in page]
        except Exception as error:
            raise translated(error) from None

    async def directories(self) -> list[str]:
        """The first segments of all names that have more than one."""
        try:
            found = await self._store.list_with_delimiter_async(self._prefix or None)
        except Exception as error:
            raise translated(error) from None
        return [path.rpartition("/")[2] for path in found["common_prefixes"]]

    async def delete(self, paths: Sequence[str]) -> None:
        """Remove objects, whether they are there or not."""
        names = [self._name(path) for path in paths]
        try:
            try:
                await self._store.delete_async(names)
            except FileNotFoundError:  # not of S3, which does not mind
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        await self._store.delete_async(name)
        except Exception as error:
            raise translated(error) from None

    def _found(self, meta: Mapping[str, Any]) -> Found:
        skipped = len(self._prefix) + 1 if self._prefix else 0
        return Found(meta["path"][skipped:], int(meta["size"]), meta["last_modified"].timestamp(), meta["e_tag"])

    def _name(self, path: str) -> str:
        return f"{self._prefix}/{path}" if self._prefix else path


def _not_written(error: Exception) -> RemoteError:
    """As ``translated``: to be told that something is not there is no answer to who writes it."""
    found = translated(error)
    return found if isinstance(found, RemoteError) else CallError(Problem("refused", str(found), "bucket"))


async def _items(stream: Any) -> AsyncGenerator[Any, None]:
    """What a stream of the client has. Its end is an error, too: see ``forget_frames``."""
    while True:
        try:
            item = await stream.__anext__()
        except StopAsyncIteration as end:
            forget_frames(end)
            return
        yield item


async def _at_once(got: Any) -> AsyncGenerator[memoryview, None]:
    try:
        yield memoryview(await got.bytes_async())
    except Exception as error:
        raise translated(error) from None


async def _by_pieces(got: Any) -> AsyncGenerator[memoryview, None]:
    try:
        async for piece in _items(got.stream(min_chunk_size=_PIECE_BYTES)):
            yield memoryview(piece)
    except Exception as error:
        raise translated(error) from None


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

    def find_all(self, paths: Sequence[str], until: float) -> list[Found | None]:
        """As ``Objects.find_all``."""
        return self._run(lambda: self.objects.find_all(paths), until)

    def read(self, path: str, until: float) -> tuple[Found, Generator[memoryview, None, None]]:
        """As ``Objects.read``. The pieces are read as they are asked for; to be closed if not all are."""
        found, pieces = self._run(lambda: self.objects.read(path, _AT_ONCE_BYTES), until)
        return found, self._each(pieces, until)

    def content(self, path: str, until: float) -> bytes | None:
        """A small object; None: there is none."""
        try:
            return b"".join(map(bytes, self.read(path, until)[1]))
        except RecordError:
            return None

    def write(self, path: str, parts: Sequence[bytes | memoryview], until: float, *, replace: bool) -> bool:
        """As ``Objects.write``."""
        return self._run(lambda: self.objects.write(path, parts, replace=replace), until)

    def pages(self, prefix: str, until: float) -> Generator[list[Found], None, None]:
        """As ``Objects.pages``; to be closed if not all are taken."""
        return self._each(self.objects.pages(prefix), until)

    def directories(self, until: float) -> list[str]:
        """As ``Objects.directories``."""
        return self._run(self.objects.directories, until)

    def delete(self, paths: Sequence[str], until: float) -> None:
        """As ``Objects.delete``."""
        self._run(lambda: self.objects.delete(paths), until)

    def stop(self) -> None:
        """Give up all calls that other threads wait for, and take no more."""
        self.calls.stop()

    def close(self) -> None:
        """End, and close all connections. Nobody else uses it any more."""
        self.calls.close()
        self.__dict__.pop("objects", None)  # connections live as long as the client

    # ── at start ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def check(self, directory: str, description: tuple[str, bytes] | None, until: float) -> None:
        """See that the bucket is there, and that this process may list, read and, unless it is only to read, write.

        Args:
            directory: to be listed.
            description: name and content of an object that is to be there; None: nothing is written.

        Raises:
            ConfigError: something is not so; says what, and names the field.
        """
        with self.explained("list"), contextlib.closing(self.pages(directory, until)) as pages:
            next(pages, None)
        path, text = description if description is not None else (f"{directory}/none", b"")
        with self.explained("read"):
            found = self.content(path, until)
        if description is not None:
            with self.explained("write"):
                self.write(path, [text], until, replace=found is not None and found != text)

    @contextlib.contextmanager
    def explained(self, step: str) -> Iterator[None]:
        """What goes wrong inside, which tries to ``step`` ("list", say), is the configuration's fault.

        Raises:
            ConfigError: says what is wrong, and names the field.
        """
        try:
            yield
        except (RemoteError, RecordError) as error:
            raise self._refusal(step, error) from None

    def _refusal(self, step: str, error: RemoteError | RecordError) -> ConfigError:
        """``error``, which came up when ``step`` was tried, as one of the configuration."""
        field, detail, config = getattr(error, "field", ""), str(error).partition(": ")[2], self._config
        where = f"{config.store.endpoint_override} " if config.store.endpoint_override else ""
        if isinstance(error, RecordError):
            field, detail = "bucket", f"there is none ({detail})"
        elif field == "access_key" and step != "list":
            field, detail = "bucket", f"no permission ({detail})"
        leave = "listed and read" if config.mode == "read" else "listed, read and, unless mode is read, written"
        bucket = f"a bucket that is there, and may be {leave}"
        accepted = {
            "bucket": "leave to delete objects" if step == "delete from" else bucket,
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
        return ConfigError(field, f"cannot {step} {where}{self.url}: {detail}", accepted)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self, call: Callable[[], Coroutine[Any, Any, _T]], until: float) -> _T:
        try:
            return self.calls.run(call, until - time.monotonic())
        except TimeoutError as error:
            raise translated(error) from None

    def _each(self, items: AsyncGenerator[_T, None], until: float) -> Generator[_T, None, None]:
        """What an asynchronous generator yields."""

        async def following() -> tuple[_T] | None:
            async for item in items:
                return (item,)
            return None

        async def end() -> None:
            await items.aclose()

        try:
            while (found := self._run(following, until)) is not None:
                yield found[0]
        finally:
            with contextlib.suppress(TierKVError):
                self._run(end, time.monotonic() + _CLOSE_S)
