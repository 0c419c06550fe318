"""What the tests of `zerojax plan` share: questions, and strict JSON."""

from __future__ import annotations

import json

from zerojax.cli.plan._options import PlanOptions

FIGURE_1 = ["plan", "--params", "7.5e9", "--devices", "64"]
TINY = ["plan", "--model", "tiny"]


def options(**changes):
    """Give options, those of the command line but for some."""
    default = {
        "params": None, "model": None, "context": None, "remat": None, "remat_policy": None,
        "hardware": "h100", "devices": 8, "memory_limit": None, "stage": None, "config": None,
        "shards": None, "model_axis": None, "offload": (), "precision": "bf16", "reduce": None,
        "batch": 1, "accumulate": 1, "optimizer": "adamw", "search": False, "verify": False,
        "largest": False, "json": None, "plot": None,
    }  # fmt: skip
    return PlanOptions(**{**default, **changes})


def strict(text):
    """Parse JSON that holds nothing but JSON."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)
