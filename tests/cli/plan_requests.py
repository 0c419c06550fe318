"""What the tests of `zerojax plan` share: requests, and strict JSON."""

from __future__ import annotations

import json

FIGURE_1 = ["plan", "--params", "7.5e9", "--devices", "64"]
TINY = ["plan", "--model", "tiny"]


def strict(text):
    """Parse JSON that holds nothing but JSON."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)
