"""What the tests of `zerojax plan` share: requests."""

from __future__ import annotations

FIGURE_1 = ["plan", "--params", "7.5e9", "--devices", "64"]
TINY = ["plan", "--model", "tiny"]
