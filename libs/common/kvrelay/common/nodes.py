"""The KV stores of a cluster: each registers as pods do (`discovery`), and knows the others."""

from typing import ClassVar

import msgspec

from kvrelay.common.discovery import Directory
from kvrelay.common.ids import Epoch, NodeId


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """See `discovery.Member`."""

    KIND: ClassVar[str] = "node"

    node_id: NodeId
    epoch: Epoch
    grpc_address: str
    http_address: str
    version: str
    transfer_address: bytes = b""
    """Of its UCX worker, through which others take blocks from it; empty: they cannot."""
    bucket: str = ""
    """Where its objects lie, endpoint and bucket; empty: it has none."""
    prefix: str = ""
    """Of its objects' keys."""

    @property
    def id(self) -> NodeId:
        return self.node_id


class NodeDirectory(Directory[NodeId, NodeRecord]):
    """The stores of a cluster as one of them knows them, itself among them."""

    def __init__(self, url: str, cluster: str) -> None:
        super().__init__(url, cluster, NodeRecord)
