"""From a configuration to a client of the store (obstore), and from what the client raises to words.

Credentials: those of the configuration; else, for S3, what botocore finds (environment, AWS's files, the machine's
role), where it is installed; else what obstore finds (environment, the machine's role). They are in no message and no
``repr``; of what a server says, only the status and the code are shown.
"""

from __future__ import annotations

import asyncio
import re
import urllib.parse
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from tierkv.errors import ConfigError, RecordError, RemoteError
from tierkv.tiers.io import ABSENT
from tierkv.tiers.obj.config import ObjTierConfig

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_KIND = re.compile(r"HttpError \{\s*kind: (\w+)")
_TLS = re.compile(r"(InvalidCertificate|InvalidMessage|AlertReceived|PeerIncompatible)\(\s*(\w+)")
_REGION = re.compile(r"<Region>([\w-]{1,32})</Region>")

#: What can be wrong about TLS, and the field.
_TLS_PROBLEMS = {
    "BadSignature": ("the server's certificate is signed by somebody else", "ca_bundle"),
    "UnknownIssuer": ("the server's certificate is signed by nobody who is trusted", "ca_bundle"),
    "InvalidContentType": ("the server speaks no TLS", "endpoint_override"),
    "Expired": ("the server's certificate has expired", "endpoint_override"),
    "ExpiredContext": ("the server's certificate has expired", "endpoint_override"),
    "NotValidForName": ("the server's certificate is another host's", "endpoint_override"),
    "NotValidForNameContext": ("the server's certificate is another host's", "endpoint_override"),
}

#: Connections that nobody has used for so long are closed.
_IDLE_S = 15.0
#: Pauses between attempts grow from the first to the last.
_FIRST_PAUSE, _LAST_PAUSE = timedelta(milliseconds=100), timedelta(seconds=5)


class Target(NamedTuple):
    """The client, and what it is of: what stands before the names of objects, and the whole as people write it."""

    store: ObjectStore
    prefix: str
    url: str


class Problem(NamedTuple):
    """What an error of the client means.

    reason: the word that metrics count. detail: for people. field: what in the configuration is to blame; empty: none.
    """

    reason: str
    detail: str
    field: str = ""


def open_target(config: ObjTierConfig, retry_s: float) -> Target:
    """The client for ``config``. Nothing is asked yet.

    Args:
        retry_s: no attempt is begun when the first one is so long ago.

    Raises:
        ConfigError: a field cannot be used.
    """
    try:
        import obstore.store
    except ImportError as error:
        raise ConfigError("type", "obj needs the package obstore", "pip install 'tierkv[obj]'") from error
    store = config.store
    prefix = config.whole_prefix
    retries = {
        "max_retries": config.max_retries,
        "retry_timeout": timedelta(seconds=retry_s),
        "backoff": {"init_backoff": _FIRST_PAUSE, "max_backoff": _LAST_PAUSE, "base": 2},
    }
    client: dict[str, Any] = {
        "connect_timeout": _duration(config.connect_timeout_s),
        "timeout": _duration(config.timeout_s),
        "pool_idle_timeout": _duration(_IDLE_S),
    }
    if store.ca_bundle:
        client["root_certificate"] = _certificates(config)
    parsed = urllib.parse.urlsplit(config.url)
    try:
        if config.is_s3:
            bucket = parsed.netloc or store.bucket
            settings = _s3_settings(config)
            # A provider, even of fixed credentials: else what the configuration leaves out comes from the environment.
            provider = _provider(config, settings)
            client["allow_http"] = True  # if that is what the endpoint says
            made: Any = obstore.store.S3Store(
                bucket, config=settings, client_options=client, retry_config=retries, credential_provider=provider
            )
            return Target(made, prefix, f"s3://{bucket}/{prefix}")
        if parsed.scheme == "file":
            made = obstore.store.from_url(config.url, mkdir=config.mode != "read")
        else:
            client["allow_http"] = True
            made = obstore.store.from_url(
                config.url, config=config.options or None, client_options=client, retry_config=retries
            )
        shown = f"{parsed.scheme}://{parsed.hostname or ''}{parsed.path.rstrip('/')}"
        return Target(made, prefix, "/".join(part for part in (shown, prefix) if part))
    except ConfigError:
        raise
    except Exception as error:  # obstore has an exception for each kind of store, and ValueError
        first = str(error).partition("\n")[0]
        for value in filter(None, [*config.options.values(), parsed.query, parsed.password]):
            first = first.replace(value, "***")
        field = "options" if config.options else "url" if config.url else f"{config.at}bucket"
        raise ConfigError(field, f"refused by the client: {first}", "what obstore accepts for this store") from None


def problem_of(error: BaseException) -> Problem:
    """What ``error``, of a call of the client, means."""
    text = str(error)
    status, code = _STATUS.search(text), _CODE.search(text)
    if status is not None:
        problem = _answered(int(status[1]), code[1] if code else "")
        if problem.field == "region" and (region := _REGION.search(text)):
            problem = problem._replace(detail=f"{problem.detail}, expects {region[1]}")
        return problem
    kind = _KIND.search(text)
    if isinstance(error, asyncio.TimeoutError | TimeoutError) or (kind is not None and kind[1] == "Timeout"):
        return Problem("timeout", "no answer in time", "endpoint_override")
    if isinstance(error, FileNotFoundError):
        return Problem(ABSENT, "not there")
    if "without LOCATION" in text:
        return Problem("wrong_region", "redirected to another region", "region")
    if (tls := _TLS.search(text)) is not None:
        detail, field = _TLS_PROBLEMS.get(tls[2], (f"TLS failed ({tls[2]})", "endpoint_override"))
        return Problem("unreachable", detail, field)
    if kind is not None and kind[1] == "Connect":
        return Problem("unreachable", "no connection", "endpoint_override")
    if kind is not None:
        return Problem("interrupted", f"the connection failed ({kind[1]})", "endpoint_override")
    if isinstance(error, OSError) and error.errno is not None:
        return Problem("error", error.strerror or type(error).__name__)
    name = type(error).__name__
    if name in ("PermissionDeniedError", "UnauthenticatedError"):
        return Problem("forbidden", "not allowed", "access_key")
    return Problem("error", text.partition("\n")[0] or name)


class CallError(RemoteError):
    """A call of the client has failed. ``field``: as ``Problem`` has it."""

    def __init__(self, problem: Problem) -> None:
        self.field = problem.field
        super().__init__(problem.reason, problem.detail)


def translated(error: BaseException) -> RecordError | CallError:
    """``error``, of a call of the client, as one of tierkv's. To be raised ``from None``: what the client says contains
    what the server says, which may be anything."""
    forget_frames(error)
    problem = problem_of(error)
    return RecordError(ABSENT, problem.detail) if problem.reason == ABSENT else CallError(problem)


def forget_frames(error: BaseException) -> None:
    """To be called with whatever a call of the client has raised, and was caught.

    The client's threads let go of a call, and of its error, only when they run Python again, which may be never. The
    error's frames hold the client, and with it all connections.
    """
    error.__traceback__ = None


def already_exists(error: BaseException) -> bool:
    """Whether ``error`` says that there is, or was just now, an object, which was not to be replaced."""
    return type(error).__name__ in ("AlreadyExistsError", "PreconditionError")


def knows_no_conditions(error: BaseException) -> bool:
    """Whether the store cannot be told not to replace an object."""
    kind = type(error).__name__
    return kind in ("NotSupportedError", "NotImplementedError") or problem_of(error).detail.startswith("501")


#: By the code of an answer: the reason, and the field.
_CODES = {
    "NoSuchBucket": ("no_bucket", "bucket"),
    "InvalidBucketName": ("no_bucket", "bucket"),
    "InvalidAccessKeyId": ("forbidden", "access_key"),
    "SignatureDoesNotMatch": ("forbidden", "secret_key"),
    "InvalidToken": ("forbidden", "session_token"),
    "ExpiredToken": ("forbidden", "session_token"),
    "AuthorizationHeaderMalformed": ("wrong_region", "region"),
    "PermanentRedirect": ("wrong_region", "region"),
    "IllegalLocationConstraintException": ("wrong_region", "region"),
    "RequestTimeTooSkewed": ("forbidden", ""),
    "SlowDown": ("busy", ""),
}


def _answered(status: int, code: str) -> Problem:
    detail = f"{status} {code}".strip()
    if code in _CODES:
        reason, field = _CODES[code]
        return Problem(reason, detail, field)
    if status == 404:
        return Problem(ABSENT, detail)
    if status in (401, 403):
        return Problem("forbidden", detail, "access_key")
    if status in (301, 307, 308):
        return Problem("wrong_region", detail, "region")
    if status in (429, 503):
        return Problem("busy", detail, "endpoint_override")
    return Problem("server_error" if status >= 500 else "refused", detail, "endpoint_override")


def _s3_settings(config: ObjTierConfig) -> dict[str, Any]:
    store = config.store
    settings: dict[str, Any] = dict(config.options)
    if store.endpoint_override:
        endpoint = store.endpoint_override
        settings["endpoint"] = endpoint if "://" in endpoint else f"{store.scheme or 'http'}://{endpoint}"
    if store.region:
        settings["region"] = store.region
    if config.checksum == "crc64nvme":
        settings["checksum_algorithm"] = "crc64nvme"
    # Said, so that the environment does not say something else.
    settings["unsigned_payload"] = config.checksum != "sha256"
    settings.setdefault("skip_signature", False)
    settings.setdefault("conditional_put", "etag")
    if store.endpoint_override:
        settings.setdefault("virtual_hosted_style_request", False)
    return settings


def _provider(config: ObjTierConfig, settings: dict[str, Any]) -> Callable[[], dict[str, Any]] | None:
    """What gives the client its credentials; None: it finds them, or needs none."""
    if str(settings["skip_signature"]).lower() in ("1", "true", "yes", "on", "y"):
        return None
    return _fixed(config.store) if config.store.access_key else _found_by_botocore(config, settings)


def _fixed(store: Any) -> Callable[[], dict[str, Any]]:
    credential = {
        "access_key_id": store.access_key,
        "secret_access_key": store.secret_key,
        "token": store.session_token or None,
        "expires_at": None,
    }
    return lambda: credential


def _found_by_botocore(config: ObjTierConfig, settings: dict[str, Any]) -> Callable[[], dict[str, Any]] | None:
    """A provider of the credentials that AWS's own rules find, and their region into ``settings``; None: obstore's.

    Raises:
        ConfigError: they find none.
    """
    try:
        import botocore.exceptions
        import botocore.session
    except ImportError as error:
        if config.profile:
            raise ConfigError("profile", "needs the package botocore", "pip install 'tierkv[obj]'") from error
        return None
    session = botocore.session.Session(profile=config.profile or None)
    try:
        credentials = session.get_credentials()
        region = session.get_config_variable("region")
    except botocore.exceptions.BotoCoreError as error:
        field = "profile" if config.profile else f"{config.at}access_key"
        raise ConfigError(field, f"cannot be found: {error}", "a profile of AWS's files, or keys") from error
    if credentials is None:
        raise ConfigError(
            f"{config.at}access_key",
            "missing, and there are no credentials in the environment, in AWS's files or of this machine",
            "access_key and secret_key, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile",
        )
    if region and "region" not in settings:
        settings["region"] = region

    def provide() -> dict[str, Any]:
        frozen = credentials.get_frozen_credentials()
        expires: datetime | None = getattr(credentials, "_expiry_time", None)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": expires,
        }

    return provide


def _certificates(config: ObjTierConfig) -> bytes:
    path = config.store.ca_bundle
    try:
        with open(path, "rb") as file:
            found = file.read()
    except OSError as error:
        problem = f"{path!r} cannot be read ({error.strerror})"
        raise ConfigError(f"{config.at}ca_bundle", problem, "a file of certificates in PEM") from error
    if b"-----BEGIN CERTIFICATE-----" not in found:
        raise ConfigError(f"{config.at}ca_bundle", f"{path!r} has no certificate", "a file of certificates in PEM")
    return found


def _duration(seconds: float) -> str:
    return f"{max(1, round(seconds * 1000))}ms"
