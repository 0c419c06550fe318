"""Figures that the papers print, copied cell by cell. GB = 1e9 bytes, TiB = 2**40.

"ZeRO" is arXiv 1910.02054v3. Where a printed figure disagrees with its own formula, the slip is
written beside it: tests hold the formula and show the slip.
"""

from __future__ import annotations

# Figure 1: 7.5e9 parameters, N = 64, K = 12; GB by stage.
FIGURE_1 = {0: 120, 1: 31.4, 2: 16.6, 3: 1.9}

# Table 1: GB per device; rows by N, columns stages 1, 2, 3. It mixes rounding and truncation: from
# 100 on cells are truncated to whole GB (1e12 at N = 64, stage 1: 4187.5 is printed 4187), below
# they are rounded (21.5625 is printed 21.6; 1.875 is printed 1.88).
TABLE_1_SHARDS = (1, 4, 16, 64, 256, 1024)
TABLE_1 = {
    7.5e9: (
        (120, 120, 120),
        (52.5, 41.3, 30),
        (35.6, 21.6, 7.5),
        (31.4, 16.6, 1.88),
        (30.4, 15.4, 0.47),
        (30.1, 15.1, 0.12),
    ),
    128e9: (
        (2048, 2048, 2048),
        (896, 704, 512),
        (608, 368, 128),
        (536, 284, 32),
        (518, 263, 8),
        (513, 257, 2),
    ),
    1e12: (
        (16000, 16000, 16000),
        (7000, 5500, 4000),
        (4750, 2875, 1000),
        (4187, 2218, 250),
        (4046, 2054, 62.5),
        (4011, 2013, 15.6),
    ),
}

# Table 2: the largest model on 32 GB devices at N = 64, in 1e9 parameters, by stage; columns are
# model axes. The theory is 32 GB over the bytes of a parameter, for a model axis of 1; the other
# columns are multiples of that figure *as rounded* (7.64 is printed 7.6, hence 121.6 and not 122.3;
# 1024 and 2048 are printed "1T" and "2T", 512 then 0.5T).
TABLE_2_MEMORY = 32e9
TABLE_2_SHARDS = 64
TABLE_2_AXES = (1, 2, 4, 8, 16)
TABLE_2_THEORY = {
    0: (2, 4, 8, 16, 32),
    1: (7.6, 15.2, 30.4, 60.8, 121.6),
    2: (14.4, 28.8, 57.6, 115.2, 230.4),
    3: (128, 256, 500, 1000, 2000),
}
# What ran: stage 1 reaches 0.82 of the theory in every column, stage 0 0.62 to 0.65.
TABLE_2_MEASURED = {0: (1.3, 2.5, 5, 10, 20), 1: (6.2, 12.5, 25, 50, 100)}

# Section 7: elements per device and step, in Psi (N-1)/N.
SECTION_7 = {0: 2, 1: 2, 2: 2, 3: 3}

# Figure 6, in 1e9 parameters: a model axis of 16 and a fixed batch on V100s of 32 GB. C3 is read
# off the figure, the others are in section 10.5. There the jump from C2 to C4 is put down to stage
# 2, which halves the states; on 25 groups it leaves 2.56/4.48 = 0.57 of them, so that a C4 of 140
# goes with a C2 of 80, not 60.
FIGURE_6 = {"C1": 40, "C2": 60, "C3": 50, "C4": 140, "C5": 150}
TABLE_3 = {
    "C1": (1, False, False),
    "C2": (1, True, False),
    "C3": (2, False, False),
    "C4": (2, True, False),
    "C5": (2, True, True),
}

# Sizes of figure 2 and table 4: layers, width, heads and 1e9 parameters. Table 4 prints a width of
# 4096 for 40 and 60; 12*L*h^2 asks for 6144.
MODELS = (
    (48, 1600, 25, 1.5),
    (72, 3072, 24, 8),
    (62, 4096, 32, 13),
    (88, 6144, 32, 40),
    (132, 6144, 32, 60),
    (100, 8192, 64, 80),
    (125, 8192, 64, 100),
    (150, 8192, 64, 120),
    (175, 8192, 64, 140),
    (212, 8192, 64, 170),
)

# A GPT of 100e9 (125 x 8192) at batch 32 keeps "around 60 GB" of checkpoints (section 3.2); section
# 6.1 says 33 GB of the same, and 2 GB with Pa over 16. The first counts two bytes an element (67 GB
# exactly), the second one (33.6 and 2.1).
CHECKPOINTS_GB_SECTION_3 = 60
CHECKPOINTS_GB_SECTION_6 = 33
PARTITIONED_GB_SECTION_6 = 2
