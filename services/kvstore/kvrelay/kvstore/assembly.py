"""The tiers that the settings ask for."""

import fcntl
import logging
import os
from fnmatch import fnmatch
from pathlib import Path

from kvrelay.common.errors import Internal
from kvrelay.common.ids import Epoch
from kvrelay.kvstore import settings as options
from kvrelay.kvstore.arena import Arena
from kvrelay.kvstore.policy import make_policy
from kvrelay.kvstore.settings import KvStoreSettings
from kvrelay.kvstore.tiers.base import Tier
from kvrelay.kvstore.tiers.bucket import S3Access
from kvrelay.kvstore.tiers.compressed import Compressed, CompressedSinking
from kvrelay.kvstore.tiers.files import FileTier
from kvrelay.kvstore.tiers.objects import ObjectTier
from kvrelay.transfer.transport import Transport

log = logging.getLogger(__name__)

_EPOCH = 16 * "[0-9a-f]"


def make_arena(settings: KvStoreSettings, epoch: Epoch) -> Arena:
    """Of this process alone: its file's name has the epoch. Files of stores that were killed go. Takes seconds where it is large.

    Raises Internal where there is no room, or another process is this node.
    """
    stem = f"kvrelay-{settings.cluster}-{settings.node}"
    for former in settings.arena_directory.glob(f"kvrelay-*.{_EPOCH}.arena"):
        if not _take_away(former) and fnmatch(former.name, f"{stem}.{_EPOCH}.arena"):
            raise Internal(f"another process is node {settings.node}: {former} is in use")
    path = settings.arena_directory / f"{stem}.{epoch}.arena"
    size = settings.tiers[0].bytes
    try:
        return Arena(path, size)
    except OSError as error:
        raise Internal(f"{path}: no {size} bytes of shared memory: {error.strerror or error}") from error


def _take_away(former: Path) -> bool:
    """False where it is in use, or another user's."""
    try:
        descriptor = os.open(former, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        former.unlink(missing_ok=True)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def make_tiers(settings: KvStoreSettings) -> list[Tier]:
    """Those below memory, not opened. Raises Internal where one cannot be as it is set."""
    return [_make_tier(tier, settings.node) for tier in settings.tiers[1:]]


def make_transport(settings: KvStoreSettings) -> Transport | None:
    """Not started. Raises Internal where UCX is asked for and not installed."""
    if settings.peer_transport == "none":
        return None
    try:
        from kvrelay.transfer.ucx import UcxTransport
    except ImportError as error:
        if settings.peer_transport == "ucx":
            raise Internal(f"UCX is not installed: {error}") from error
        log.warning("UCX is not installed: no blocks come out of other nodes' memory")
        return None
    return UcxTransport()


def s3_of(settings: KvStoreSettings) -> options.S3Tier | None:
    return next((tier for tier in settings.tiers if isinstance(tier, options.S3Tier)), None)


def bucket_of(settings: KvStoreSettings) -> str:
    """The same for all who can read each other's objects; empty: there are none that others could read."""
    tier = s3_of(settings)
    return (
        "" if tier is None or tier.encoding != "exact" else f"{tier.endpoint or tier.region or 'default'} {tier.bucket}"
    )


def _make_tier(tier: options.AnyTier, node: str) -> Tier:
    policy = make_policy(tier.policy, tier.bytes)
    if isinstance(tier, options.FileTier):
        files = FileTier(
            tier.directory,
            tier.bytes,
            policy,
            direct=tier.direct,
            threads=tier.threads,
            timeout_s=tier.timeout_seconds,
        )
        return CompressedSinking(files) if tier.encoding == "zstd" else files
    assert isinstance(tier, options.S3Tier), "there is one cpu tier, the first"
    try:
        objects = ObjectTier(
            f"s3://{tier.bucket}/{tier.prefix}",
            tier.bytes,
            policy,
            access=_access(tier),
            prefix=node,
            concurrency=tier.concurrency,
            time_budget_s=tier.timeout_seconds,
            multipart_bytes=tier.multipart_bytes,
        )
        return Compressed(objects) if tier.encoding == "zstd" else objects
    except ValueError as error:
        raise Internal(f"the s3 tier: {error}") from error


def _access(tier: options.S3Tier) -> S3Access:
    return S3Access(
        endpoint=tier.endpoint,
        region=tier.region,
        access_key_id=tier.credential("access_key_id"),
        secret_access_key=tier.credential("secret_access_key"),
        session_token=tier.credential("session_token"),
        virtual_hosted=tier.virtual_hosted,
        upload_checksum=None if tier.upload_checksum == "none" else tier.upload_checksum,
    )
