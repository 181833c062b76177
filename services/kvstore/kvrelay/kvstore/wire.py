"""The store's messages from and to protobuf. What came over the wire and no core type can hold raises InvalidRequest."""

import re
from collections.abc import Iterable, Sequence

from kvrelay.common.blocks import ID_BYTES
from kvrelay.common.errors import InvalidRequest
from kvrelay.common.ids import BlockId, Fingerprint, PodId
from kvrelay.common.layout import KvDtype
from kvrelay.kvstore.audit import TierReport, Verified
from kvrelay.kvstore.level import Counters
from kvrelay.kvstore.peers.sender import Wanted
from kvrelay.kvstore.sessions import MAX_BLOCKS, Begun, Found, Loaded, Reply, Session
from kvrelay.kvstore.supply import Hello
from kvrelay.transfer.block import BlockInfo
from kvrelay.v1 import kvstore_pb2 as pb

MAX_NAME_CHARS = 256
MAX_FETCHED = 1024
_SHAPE = re.compile(r"[0-9a-f]{16}")
_DTYPES = {dtype.value: dtype for dtype in KvDtype}
_TIERS = {"cpu": pb.TIER_CPU, "file": pb.TIER_FILE, "s3": pb.TIER_S3, "peer": pb.TIER_PEER}
_ENCODINGS = {"exact": pb.ENCODING_EXACT, "zstd": pb.ENCODING_ZSTD}


def hello_from_proto(message: pb.AttachHello) -> Hello:
    for name in ("pod_id", "fingerprint"):
        if not 0 < len(getattr(message, name)) <= MAX_NAME_CHARS:
            raise InvalidRequest(f"{name} must have 1 to {MAX_NAME_CHARS} characters", f"hello.{name}")
    if not _SHAPE.fullmatch(message.shape):
        raise InvalidRequest("shape must have 16 hexadecimal digits", "hello.shape")
    for dtype in (message.dtype, *message.readable):
        if dtype not in _DTYPES:
            raise InvalidRequest(f"KV dtype {dtype[:40]!r} is unknown", "hello.dtype")
    return Hello(
        pod_id=PodId(message.pod_id),
        fingerprint=Fingerprint(message.fingerprint),
        shape=message.shape,
        dtype=_DTYPES[message.dtype],
        readable=frozenset(_DTYPES[dtype] for dtype in message.readable),
    )


def ids_from_proto(packed: bytes, field: str) -> list[BlockId]:
    if len(packed) % ID_BYTES or len(packed) > MAX_BLOCKS * ID_BYTES:
        raise InvalidRequest(f"{field} must be at most {MAX_BLOCKS} ids of {ID_BYTES} bytes", field)
    return [BlockId(packed[start : start + ID_BYTES]) for start in range(0, len(packed), ID_BYTES)]


def take(session: Session, message: pb.AttachRequest) -> None:
    """Hands a pod's message to its session. Raises InvalidRequest, which ends it."""
    match message.WhichOneof("kind"):
        case "find":
            find = message.find
            session.find(find.call, find.first, ids_from_proto(find.ids, "find.ids"))
        case "load":
            load = message.load
            session.load(load.call, load.first, ids_from_proto(load.ids, "load.ids"))
        case "cancel":
            session.cancel(message.cancel.call)
        case "release":
            session.release(_bounded(message.release.offsets, "release.offsets"))
        case "begin":
            _begin(session, message.begin)
        case "commit":
            commit = message.commit
            offsets = _bounded(commit.offsets, "commit.offsets")
            session.commit(offsets, commit.checksums, _bounded(commit.given_up, "commit.given_up"))
        case "corrupt":
            session.corrupt(_bounded(message.corrupt.offsets, "corrupt.offsets"))
        case kind:
            raise InvalidRequest(f"a message of kind {kind} does not belong here", "kind")


def _begin(session: Session, begin: pb.BeginBlocks) -> None:
    ids = ids_from_proto(begin.ids, "begin.ids")
    heads = ids_from_proto(begin.heads, "begin.heads")
    if len(heads) != len(ids):
        raise InvalidRequest(f"{len(heads)} heads for {len(ids)} ids", "begin.heads")
    session.begin(begin.call, ids, heads, begin.size)


def _bounded(offsets: Sequence[int], field: str) -> Sequence[int]:
    if len(offsets) > MAX_BLOCKS:
        raise InvalidRequest(f"over {MAX_BLOCKS} offsets", field)
    return offsets


def wanted_from_proto(request: pb.FetchRequest) -> list[Wanted]:
    if len(request.blocks) > MAX_FETCHED or len({block.tag for block in request.blocks}) != len(request.blocks):
        raise InvalidRequest(f"blocks must be at most {MAX_FETCHED}, and their tags different", "blocks")
    if any(len(block.id) != ID_BYTES for block in request.blocks):
        raise InvalidRequest(f"ids must have {ID_BYTES} bytes", "blocks.id")
    return [Wanted(BlockId(block.id), block.tag, block.size, block.checksum, block.joined) for block in request.blocks]


def reply_to_proto(reply: Reply) -> pb.AttachResponse:
    match reply:
        case Found():
            runs = (
                pb.FoundRun(
                    tier=_TIERS[run.tier], num_blocks=run.num_blocks, num_bytes=run.num_bytes, seconds=run.seconds
                )
                for run in reply.runs
            )
            return pb.AttachResponse(found=pb.Found(call=reply.call, runs=runs))
        case Begun():
            return pb.AttachResponse(begun=pb.Begun(call=reply.call, offsets=reply.offsets))
        case Loaded():
            blocks = (_loaded_block(slot.offset, slot.info) for slot in reply.slots)
            return pb.AttachResponse(loaded=pb.Loaded(call=reply.call, blocks=blocks, end=reply.end))


def _loaded_block(offset: int, info: BlockInfo) -> pb.LoadedBlock:
    return pb.LoadedBlock(
        offset=offset,
        size=info.size,
        dtype=info.dtype,
        encoding=_ENCODINGS[info.encoding],
        checksum=info.checksum,
    )


def records_to_proto(blocks: Iterable[tuple[BlockInfo, str]]) -> pb.ListResponse:
    return pb.ListResponse(
        blocks=[
            pb.BlockRecord(
                id=info.id,
                fingerprint=info.fingerprint,
                tier=_TIERS[tier],
                size=info.size,
                dtype=info.dtype,
                encoding=_ENCODINGS[info.encoding],
                checksum=info.checksum,
            )
            for info, tier in blocks
        ]
    )


def counters_to_proto(counters: Counters) -> pb.TierCounters:
    return pb.TierCounters(**{name: getattr(counters, name) for name in Counters.__slots__})


def report_to_proto(report: TierReport) -> pb.TierStat:
    return pb.TierStat(
        tier=_TIERS[report.tier],
        num_blocks=report.num_blocks,
        used_bytes=report.used_bytes,
        limit_bytes=report.limit_bytes,
        healthy=report.healthy,
        reason=report.reason,
        counters=counters_to_proto(report.counters),
    )


def verified_to_proto(seen: Verified) -> pb.VerifyResponse:
    return pb.VerifyResponse(
        tier=_TIERS[seen.tier],
        num_whole=seen.num_whole,
        num_corrupt=seen.num_corrupt,
        num_failed=seen.num_failed,
    )
