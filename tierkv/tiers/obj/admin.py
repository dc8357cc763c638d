"""What ``tierkv.tiers.admin`` needs to know of a bucket."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from typing import ClassVar

from tierkv.errors import ConfigError, RecordError
from tierkv.tiers import record
from tierkv.tiers.admin import Storage, Stored
from tierkv.tiers.io import ABSENT
from tierkv.tiers.obj.bucket import Bucket, Found
from tierkv.tiers.obj.config import ObjTierConfig
from tierkv.tiers.paths import DESCRIPTION, DIGEST, parse

#: Whether the store answers at all shows within so many seconds.
_OPEN_S = 30.0
#: Nobody waits for what follows but a person; the client gives up by itself (``timeout_s``, ``max_retries``).
_FOREVER = math.inf
#: Objects that are removed at a time: as many as S3 takes in one request.
_BATCH = 1000


def open_bucket(config: ObjTierConfig) -> Storage:
    """What the tier with this configuration, which has a ``url``, has stored. Nothing is written, if its mode says so.

    Raises:
        ConfigError: it cannot be reached, or has nothing of a tier.
    """
    bucket = Bucket(config, "store")
    try:
        with bucket.explained("list"):
            found = bucket.directories(time.monotonic() + _OPEN_S)
        namespaces = sorted(filter(DIGEST.fullmatch, found))
        if not namespaces:
            raise ConfigError(
                "url", f"{config.url!r} has no namespace of an obj tier", "the url of one, with its prefix"
            )
    except BaseException:
        bucket.close()
        raise
    return _BucketStorage(bucket, namespaces)


def read_description(config: ObjTierConfig) -> bytes | None:
    """The ``namespace.json`` directly below the configuration's ``url``; None: there is none.

    Raises:
        ConfigError: it cannot be reached.
    """
    bucket = Bucket(config, "store")
    try:
        with bucket.explained("read"):
            return bucket.content(DESCRIPTION, time.monotonic() + _OPEN_S)
    finally:
        bucket.close()


class _BucketStorage(Storage):
    #: Each waits for the store most of the time, and has a few MiB of an object in memory.
    readers: ClassVar[int] = 8

    def __init__(self, bucket: Bucket, namespaces: Sequence[str]) -> None:
        self._bucket = bucket
        self._namespaces = namespaces
        self._before = f"{bucket.url.rstrip('/')}/"

    def stored(self, namespace: str = "") -> Iterator[Stored]:
        for directory in self._namespaces:
            if not directory.startswith(namespace):
                continue
            with self._bucket.explained("list"):
                for page in self._bucket.pages(directory, _FOREVER):
                    for each in page:
                        name = parse(each.path) if each.path.count("/") == 3 else None
                        if name is not None:
                            path = self._before + each.path
                            yield Stored(path, name, each.nbytes, each.written_s, _written(each))

    def description(self, namespace: bytes) -> bytes:
        found = self._bucket.content(f"{namespace.hex()}/{DESCRIPTION}", _FOREVER)
        if found is None:
            raise RecordError(ABSENT)
        return found

    def check(self, stored: Stored) -> None:
        found, pieces = self._bucket.read(self._path(stored), _FOREVER)
        with contextlib.closing(pieces):
            record.verify_pieces(pieces, stored.name, found.nbytes)

    def is_there(self, stored: Stored) -> bool:
        """It is asked for anew. A store that does not answer is not what was looked for, and an error."""
        with self._bucket.explained("read"):
            found = self._bucket.find_all([self._path(stored)], _FOREVER)[0]
        return found is not None and _written(found) == stored.written

    def remove(self, chosen: Sequence[Stored]) -> tuple[int, int]:
        """Whether they were used since, no store can tell: whoever needs them computes them again."""
        for start in range(0, len(chosen), _BATCH):
            with self._bucket.explained("delete from"):
                self._bucket.delete([self._path(each) for each in chosen[start : start + _BATCH]], _FOREVER)
        return len(chosen), sum(each.nbytes for each in chosen)

    def close(self) -> None:
        self._bucket.close()

    def _path(self, stored: Stored) -> str:
        return stored.path.removeprefix(self._before)


def _written(found: Found) -> object:
    """By the second: an answer for one object has no fractions."""
    return found.nbytes, found.e_tag or int(found.written_s)
