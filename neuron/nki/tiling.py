"""The arithmetic of tiles: hardware limits, how sizes are cut, what fits. Plain Python.

The kernels call these functions while they are compiled and the tests call them as they are, so
there is nothing here that the NKI compiler's subset of Python lacks: integers, lists, loops.
"""

PARTITIONS = 128
"""Rows of a tile in SBUF or PSUM, and of the tensor engine."""
MOVING_COLUMNS = 512
"""Columns of a product's moving operand: one PSUM bank of float32."""
PSUM_BANK_BYTES = 2048
PSUM_BANKS = 8
SBUF_PARTITION_BYTES = 192 * 1024
"""The smaller of the two: 192 KiB on Trn1, 224 KiB on Trn2."""

STEP_KEYS = MOVING_COLUMNS
"""Keys attended to in one step of the online softmax."""

NEVER = float(2**24)
"""A query position that no query has; up to here integers are exact in float32."""
HIDDEN_SCORE = -1.0e30
"""Added to the score of a key that a query does not see. Finite: −inf − −inf would be NaN."""
LOWEST_HIGHEST = -1.0e20
"""Highest score of a row that has seen nothing. exp(HIDDEN_SCORE − this) is 0, so nothing counts;
it lies far above HIDDEN_SCORE and far below every score."""
LEAST_TOTAL = 0.5
"""Stands in for a sum of exponentials that is 0. A sum that is not has a term exp(0) = 1, of which
the scalar engine's approximation is surely above this. The logarithm is defined on [2⁻⁶⁴, 2⁶⁴]."""

Piece = tuple[int, int]


def cut(total: int, size: int) -> list[Piece]:
    """(start, stop) of pieces of ``size`` that cover ``[0, total)``; the last may be shorter."""
    pieces = []
    for start in range(0, total, size):
        pieces.append((start, min(start + size, total)))
    return pieces


def share(pieces: list[Piece], program: int, programs: int) -> list[Piece]:
    """Those that one of ``programs`` physical cores takes: every ``programs``-th."""
    taken = []
    for index in range(program, len(pieces), programs):
        taken.append(pieces[index])
    return taken


def step_bytes(key_width: int, value_width: int, item_bytes: int) -> int:
    """SBUF bytes per partition of the tiles that one step of the online softmax makes."""
    blocks = STEP_KEYS // PARTITIONS
    stored = key_width + value_width
    block = 2 * stored * item_bytes + 4 * stored + stored + 2 * 4  # read, cleaned, zeros, mask
    keys = len(cut(key_width, PARTITIONS)) * STEP_KEYS * item_bytes
    scores = STEP_KEYS * (3 * 4 + item_bytes)  # first queries that see, penalties, scores, weights
    turned = blocks * PARTITIONS * item_bytes
    return blocks * block + keys + scores + turned + 4 * 4


def state_bytes(num_rows: int, key_width: int, value_width: int, item_bytes: int) -> int:
    """SBUF bytes per partition of what is kept of ``num_rows`` query rows between steps."""
    tiles = len(cut(num_rows, PARTITIONS))
    queries = len(cut(key_width, PARTITIONS)) * num_rows * item_bytes
    return queries + tiles * (4 * value_width + 3 * 4)


def fits(num_rows: int, key_width: int, value_width: int, item_bytes: int) -> bool:
    """Whether the rows' state fits beside two steps: one that is computed, one that is loaded."""
    state = state_bytes(num_rows, key_width, value_width, item_bytes)
    step = step_bytes(key_width, value_width, item_bytes)
    return state + 2 * step <= SBUF_PARTITION_BYTES


def num_instructions(num_rows: int, num_keys: int, key_width: int, value_width: int) -> int:
    """Instructions of one KV head's attention, all loops unrolled: an estimate from above.

    A block of 128 keys is read, cleaned and turned once; per tile of 128 query rows and step of 512
    keys there are ten instructions of softmax and four per block for the values.
    """
    chunks = len(cut(key_width, PARTITIONS))
    blocks, steps = len(cut(num_keys, PARTITIONS)), len(cut(num_keys, STEP_KEYS))
    tiles = len(cut(num_rows, PARTITIONS))
    per_block = 7 + 2 * chunks
    per_attend = 10 + chunks
    return blocks * per_block + tiles * (steps * per_attend + blocks * 3) + steps + tiles * 12
