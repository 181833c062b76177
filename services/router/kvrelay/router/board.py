"""The loads of the pods in view as columns of numbers, so that a policy weighs a thousand pods in a few vector operations."""

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvrelay.router.costs import Floats
from kvrelay.router.expected import Expected
from kvrelay.router.load import COLUMNS, Load
from kvrelay.router.policy import PodsView
from kvrelay.router.prefixindex import Hits, PrefixIndex


class Group:
    """The pods that can send each other KV: of one model, so of one fingerprint. Rows are prefill pods, then decode pods.

    `values[column]` is current at any time: each load writes its row on each change.
    """

    def __init__(self, prefill: Sequence[Load], decode: Sequence[Load], index: PrefixIndex, expected: Expected) -> None:
        """At least one decode pod."""
        self.prefill = prefill
        self.decode = decode
        self.split = len(prefill)
        """The row of the first decode pod."""
        self.fingerprint = decode[0].fingerprint
        self.self_sufficient = np.array([load.self_sufficient for load in decode], np.bool_)
        loads = [*prefill, *decode]
        cells = array("d", bytes(8 * COLUMNS * len(loads)))
        self.values: Floats = np.frombuffer(cells).reshape(COLUMNS, len(loads))
        for row, load in enumerate(loads):
            load.write_to(cells, row, len(loads))
        self._slots = index.slots(load.pod_id for load in loads)
        self._expected_slots = expected.index.slots(load.pod_id for load in loads)

    def hits(self, stored: Hits, expected: Hits) -> Floats:
        """Tokens by row: the longer of what a pod has and of what it is expected to have."""
        return np.maximum(stored[self._slots], expected[self._expected_slots])


def among(loads: Sequence[Load], pods: Iterable[Load]) -> npt.NDArray[np.bool_]:
    chosen = frozenset(pods)
    return np.fromiter((load in chosen for load in loads), np.bool_, len(loads))


class Board:
    """Groups with at least one decode pod. Stands for one view and one state of the index's slots."""

    def __init__(self, pods: PodsView, index: PrefixIndex, expected: Expected) -> None:
        everyone = [*pods.decode, *(load for loads in pods.prefill.values() for load in loads)]
        expected.follow(load.pod_id for load in everyone if load.pod_id in index)
        self._pods = pods
        self._index = index
        self._version = index.version
        by_group: dict[int, list[Load]] = {}
        for load in pods.decode:
            by_group.setdefault(load.group, []).append(load)
        self.groups = {
            number: Group(pods.prefill.get(number, ()), loads, index, expected) for number, loads in by_group.items()
        }

    def stands(self, pods: PodsView) -> bool:
        return self._pods is pods and self._version == self._index.version
