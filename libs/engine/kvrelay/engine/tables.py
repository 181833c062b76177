"""The block tables of running sequences, each in a row of its own."""

import numpy as np

from kvrelay.common.errors import Internal
from kvrelay.engine.sequence import Sequence


class BlockTables:
    """[max_num_seqs, max_blocks]: the blocks of each sequence in its row."""

    def __init__(self, max_num_seqs: int, max_blocks: int) -> None:
        self.table = np.zeros((max_num_seqs, max_blocks), np.int32)
        self._free = list(range(max_num_seqs - 1, -1, -1))

    def update(self, seq: Sequence) -> int:
        """Brings the sequence's row up to date: gives the first of its blocks that was written, their number if none was.

        Raises Internal where there are more sequences than rows.
        """
        if seq.row < 0:
            if not self._free:
                raise Internal(f"the batch has more than {len(self.table)} sequences")
            seq.row = self._free.pop()
        known, blocks = seq.num_tabled, seq.blocks
        if known < len(blocks):
            self.table[seq.row, known : len(blocks)] = blocks[known:]
            seq.num_tabled = len(blocks)
        return known

    def forget(self, seq: Sequence) -> None:
        if seq.row >= 0:
            self._free.append(seq.row)
            seq.row, seq.num_tabled = -1, 0
