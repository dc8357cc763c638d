"""The configuration of the obj tier."""

from __future__ import annotations

import re
import urllib.parse
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tierkv.config import NonNegative, Positive, Seconds, TierConfig
from tierkv.errors import ConfigError
from tierkv.types import Locality

Scheme = Literal["http", "https"]

#: A part of a prefix, between slashes.
_SEGMENT = re.compile(r"(?!\.{1,2}$)[^\x00-\x1f\x7f/]+")
#: More than what is allowed today: there are old ones, and other stores.
_BUCKET = re.compile(r"[\w.:-]{1,255}", re.ASCII)

#: Never shown.
SECRETS = ("access_key", "secret_key", "session_token")


class StoreConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """How to reach a bucket: the fields of vLLM's ``store_config``, which may stand in the tier's own entry, too.

    bucket: its name. endpoint_override: the server's URL, or ``host:port``; empty: AWS's of the region.
    scheme: of an ``endpoint_override`` without one; ``http``, as in vLLM, unless it is said.
    region: empty: that of the environment or of AWS's configuration files, else ``us-east-1``.
    access_key, secret_key, session_token: empty: from the environment, AWS's files, or the machine's role.
    ca_bundle: a file of certificates (PEM) to trust beside the system's.
    """

    bucket: str = ""
    endpoint_override: str = ""
    scheme: Scheme | None = None
    region: str = ""
    access_key: str = ""
    secret_key: str = ""
    session_token: str = ""
    ca_bundle: str = ""

    def __repr__(self) -> str:
        return _without_secrets(self)


class ObjTierConfig(TierConfig, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """bucket, endpoint_override, scheme, region, access_key, secret_key, session_token, ca_bundle: as ``StoreConfig``,
        unless they stand in ``store_config``.
    profile: which of AWS's configuration files to use.
    url: instead of a bucket: ``s3://bucket/prefix``, ``gs://…``, ``az://…`` or ``file:///…``.
    options: more settings of obstore for this kind of store, by its names for them.
    prefix: of the names of all objects.
    mode: ``read`` never writes.
    n_read_connections, n_write_connections, n_lookup_connections: objects that are read, written and asked for at the
        same time. io_threads: vLLM's name for the first two.
    connect_timeout_s: until there is a connection. timeout_s: for one attempt.
    max_retries: attempts after the first, while there is time; with growing pauses.
    multipart_bytes: records that are larger are sent in several parts at once.
    checksum: by which the store verifies what it gets: ``sha256`` (of the request's signature, which any S3 store
        checks), ``crc64nvme`` (cheaper; not every store knows it), or ``none``.
    list_interval_s: how often the bucket is listed, to know what others have stored. 0: never.
    locality: whether the store is on this host, for requests that choose (``kv_load_tiers``). None: does not say.
    enable_kv_events: accepted for vLLM's sake; not used yet.
    """

    bucket: str = ""
    endpoint_override: str = ""
    scheme: Scheme | None = None
    region: str = ""
    access_key: str = ""
    secret_key: str = ""
    session_token: str = ""
    ca_bundle: str = ""
    store_config: StoreConfig | None = None
    profile: str = ""
    url: str = ""
    options: dict[str, str] = msgspec.field(default_factory=dict)
    prefix: str = ""
    mode: Literal["readwrite", "read"] = "readwrite"
    n_read_connections: Positive = 16
    n_write_connections: Positive = 8
    n_lookup_connections: Positive = 32
    io_threads: Positive | None = None
    connect_timeout_s: Seconds = 5.0
    timeout_s: Seconds = 20.0
    max_retries: NonNegative = 3
    multipart_bytes: Annotated[int, Meta(ge=5 << 20)] = 64 << 20
    checksum: Literal["sha256", "crc64nvme", "none"] = "sha256"
    list_interval_s: Annotated[float, Meta(ge=0)] = 600.0
    locality: Locality | None = None
    enable_kv_events: bool = False

    def __repr__(self) -> str:
        return _without_secrets(self)

    @property
    def store(self) -> StoreConfig:
        """How to reach the bucket, whichever way it is written.

        Raises:
            ConfigError: it is written in two ways, or in none, or does not fit together.
        """
        names = StoreConfig.__struct_fields__
        own = StoreConfig(**{name: getattr(self, name) for name in names})
        given = [name for name in names if getattr(self, name) not in ("", None)]
        if self.store_config is not None and given:
            raise ConfigError(given[0], "given beside store_config", "all of these fields in one place")
        found = own if self.store_config is None else self.store_config
        at = "" if self.store_config is None else "store_config."
        if self.url and found.bucket:
            raise ConfigError("url", f"given beside {at}bucket", "one of url and bucket")
        if not self.url and not found.bucket:
            raise ConfigError(f"{at}bucket", "missing", "the bucket's name, or a url")
        if self.url:
            self._check_url(found, at)
        if found.bucket and not _BUCKET.fullmatch(found.bucket):
            raise ConfigError(f"{at}bucket", f"{found.bucket!r} is no bucket's name", "a bucket's name")
        if bool(found.access_key) != bool(found.secret_key):
            missing = "secret_key" if found.access_key else "access_key"
            raise ConfigError(f"{at}{missing}", "missing", "access_key and secret_key, or neither")
        if found.session_token and not found.access_key:
            raise ConfigError(f"{at}session_token", "given without access_key", "one together with its keys")
        scheme, separator, _ = found.endpoint_override.partition("://")
        if separator and (scheme not in ("http", "https") or found.scheme not in (None, scheme)):
            problem = f"{found.endpoint_override!r} has the scheme {scheme}, scheme says {found.scheme or 'nothing'}"
            raise ConfigError(f"{at}endpoint_override", problem, "http:// or https://, and the same in scheme")
        return found

    def _check_url(self, store: StoreConfig, at: str) -> None:
        parsed = urllib.parse.urlsplit(self.url)
        if not parsed.scheme or parsed.scheme == "memory":
            problem = "has no scheme" if not parsed.scheme else "names a store of this process"
            raise ConfigError("url", f"{_shown(self.url)!r} {problem}", "s3://bucket/prefix, gs://…, az://…, file:///…")
        if self.is_s3:
            if not parsed.hostname or parsed.query or parsed.fragment or "@" in parsed.netloc:
                raise ConfigError("url", f"{_shown(self.url)!r} is not of that form", "s3://bucket/prefix")
            return
        for name in ("endpoint_override", "region", *SECRETS):
            if getattr(store, name):
                raise ConfigError(f"{at}{name}", f"not for {parsed.scheme}://", "settings of that store, in options")

    @property
    def is_s3(self) -> bool:
        return not self.url or self.url.partition(":")[0] in ("s3", "s3a")

    @property
    def whole_prefix(self) -> str:
        """What stands before the names of all objects.

        Raises:
            ConfigError: no store could have it.
        """
        path = urllib.parse.urlsplit(self.url).path.strip("/") if self.url and self.is_s3 else ""
        for field, part in (("url", path), ("prefix", self.prefix.strip("/"))):
            if part and not all(_SEGMENT.fullmatch(segment) for segment in part.split("/")):
                raise ConfigError(field, f"{part!r} has a segment that no name can have", "names with single slashes")
        return "/".join(part for part in (path, self.prefix.strip("/")) if part)

    @property
    def at(self) -> str:
        """What stands before the names of fields of ``store``, in errors."""
        return "" if self.store_config is None else "store_config."


def _shown(url: str) -> str:
    """``url`` without what may be secret in it: who asks, and with which parameters."""
    before, _, rest = url.partition("://")
    host, slash, path = rest.partition("?")[0].partition("/")
    return f"{before}://{host.rpartition('@')[2]}{slash}{path}" if rest else before


def _without_secrets(config: StoreConfig | ObjTierConfig) -> str:
    def shown(name: str) -> Any:
        value = getattr(config, name)
        if name == "options":
            return dict.fromkeys(value, "***")
        if name == "url":
            return _shown(value)
        return "***" if name in SECRETS and value else value

    fields = ", ".join(f"{name}={shown(name)!r}" for name in config.__struct_fields__)
    return f"{type(config).__name__}({fields})"
