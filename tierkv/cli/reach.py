"""How subcommands reach what tiers have stored: a directory, or a URL and the options that go with it."""

from __future__ import annotations

import argparse
import contextlib
import urllib.parse
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from tierkv.tiers.admin import Storage
    from tierkv.tiers.obj.config import ObjTierConfig

#: Options, by the fields of ``ObjTierConfig`` that they are; and those that only S3 has.
_OPTIONS = {"endpoint_override": "endpoint", "region": "region", "profile": "profile", "ca_bundle": "ca_bundle"}
_S3_ONLY = ("endpoint", "region", "profile")

#: Where credentials come from, by their fields.
_VARIABLES = {
    "access_key": "AWS_ACCESS_KEY_ID",
    "secret_key": "AWS_SECRET_ACCESS_KEY",
    "session_token": "AWS_SESSION_TOKEN",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "object stores",
        "Credentials are those of the environment (AWS_ACCESS_KEY_ID and so on), of AWS's files, or of the machine.",
    )
    group.add_argument("--endpoint", metavar="URL", help="of a server that is not AWS's; s3:// only")
    group.add_argument("--region", metavar="NAME", help="of the bucket; s3:// only")
    group.add_argument("--profile", metavar="NAME", help="of AWS's files; s3:// only")
    group.add_argument("--ca-bundle", metavar="FILE", help="certificates (PEM) to trust beside the system's")


def is_url(path: str) -> bool:
    return "://" in path


@contextlib.contextmanager
def open_storage(args: argparse.Namespace) -> Iterator[Storage]:
    """What lies at ``args.path``.

    Raises:
        ConfigError: it cannot be used; names what was typed. Also for what is inside the ``with`` block.
    """
    if is_url(args.path):
        from tierkv.tiers.obj.admin import open_bucket

        with naming("PATH", args.path, args), open_bucket(config_of("PATH", args.path, args)) as storage:
            yield storage
    else:
        from tierkv.tiers.fs.admin import open_root

        refuse_options(args, f"{args.path!r} is a directory")
        with open_root(args.path) as storage:
            yield storage


def config_of(name: str, url: str, args: argparse.Namespace) -> ObjTierConfig:
    """The configuration that the options, and the argument ``name``, make.

    Raises:
        ConfigError: they do not fit together.
    """
    from tierkv.tiers.obj.config import ObjTierConfig

    parsed = urllib.parse.urlsplit(url)
    if parsed.password is not None:  # which is shown to nobody, not even to who has typed it
        raise ConfigError(name, "has a password in it", "credentials in the environment or in AWS's files")
    if not _is_s3(url):
        refuse_options(args, f"{url!r} is another store's", _S3_ONLY)
    elif not parsed.netloc:
        raise ConfigError(name, f"{url!r} names no bucket", "s3://bucket/prefix")
    options: dict[str, Any] = {field: getattr(args, option) or "" for field, option in _OPTIONS.items()}
    return ObjTierConfig(type="obj", mode="read", url=url, **options)


def refuse_options(args: argparse.Namespace, why: str, which: Collection[str] = tuple(_OPTIONS.values())) -> None:
    """Raise ConfigError if one of the options ``which`` is given: it would have no effect."""
    for option in which:
        if getattr(args, option):
            where = "an s3:// URL" if option in _S3_ONLY else "the URL of an object store"
            raise ConfigError(_flag(option), f"given, but {why}", f"together with {where}")


@contextlib.contextmanager
def naming(name: str, url: str, args: argparse.Namespace) -> Iterator[None]:
    """Errors that name a field of ``config_of``'s configuration name what was typed, or what the environment has."""
    from tierkv.tiers.obj.config import ObjTierConfig

    try:
        yield
    except ConfigError as error:
        if error.field not in ObjTierConfig.__struct_fields__:
            raise
        source, accepted = name, error.accepted
        if error.field in _OPTIONS and (_is_s3(url) or _OPTIONS[error.field] not in _S3_ONLY):
            source = _flag(_OPTIONS[error.field])
        elif error.field in _VARIABLES:
            accepted = "credentials of a user who may use the bucket, in the environment"
            if _is_s3(url):
                source = "--profile" if args.profile else _VARIABLES[error.field]
                accepted += " or in AWS's files, or a --profile"
        raise ConfigError(source, error.problem, accepted) from error


def _is_s3(url: str) -> bool:
    return urllib.parse.urlsplit(url).scheme in ("s3", "s3a")


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"
