"""In how many parts XLA:GPU makes a product, so that a short list of tiles keeps all cores busy.

It cuts what the product sums over; parts are written in fp32, and another kernel adds them up.

Example: [256, 2560] x [2560, 640] has 10 tiles of 128 x 128 for 132 cores. In 8 parts a core sums
over 320 numbers instead of 2560, which is worth writing 8 x 256 x 640 numbers.

Source: xla/backends/gpu/transforms/splitk_rewriter.cc, its costs on an H100.
"""

import math

_CORES = 132
_TILE = 128
#: Elements of 2 bytes that each part of an operand's row has to be a multiple of.
_MULTIPLE = 8
# Costs of a FLOP, of a byte of the product, of a byte of the sum, and of the sum's launch.
_FLOP, _BYTE, _SUM_BYTE, _LAUNCH = 100.0, 0.194136, 193.1384, 4.36e7


def num_parts(m: float, n: float, k: float, batch: float, width: int) -> int:
    """Count the parts of [batch, m, k] x [batch, k, n], whose elements have `width` bytes."""
    tile = min(m, _TILE) * min(n, _TILE)
    tiles = batch * math.ceil(m / _TILE) * math.ceil(n / _TILE)
    read, made = batch * k * (m + n) * width, batch * m * n

    def cost(parts: int) -> float:
        waves = max(1.0, tiles * parts * tile / (_CORES * _TILE**2))
        computed = 2 * tile * math.ceil(k / parts) * waves * _FLOP
        is_cut = parts > 1
        moved = read + made * parts * (4 if is_cut else width)
        added = _LAUNCH + made * (4 * parts + width) * _SUM_BYTE
        return max(computed, moved * _BYTE) + is_cut * added

    return min((2**power for power in range(12)), key=cost)


def is_padded(k: float, parts: int) -> bool:
    """Return whether operands are padded to have parts of one size: copied, both."""
    return parts > 1 and k % (parts * _MULTIPLE) > 0
