"""A run of one's own: another size, another vocabulary, a file of tokens; what it records."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from tests.cli.running import NUM_BYTES, QUICK
from tests.texts import prose, save_tokenizer
from zerojax.checkpoint import read_manifest
from zerojax.cli import main
from zerojax.cli.train._screen import measure
from zerojax.data import Tokenizer
from zerojax.hardware import HARDWARE
from zerojax.models import gpt

SIZES = ["--layers", "2", "--width", "32", "--heads", "2", "--context", "16", *QUICK]
CONFIG = gpt.Config(num_layers=2, width=32, num_heads=2, vocab_size=300, context=16)


def lines_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_model_and_a_vocabulary_of_ones_own_learn_from_a_file_of_tokens(
    folder, capsys, monkeypatch
):
    text = prose(NUM_BYTES)
    tokenizer = Tokenizer(save_tokenizer(folder / "tokenizer.json", text))
    np.save(folder / "tokens.npy", tokenizer.encode([text]))
    read = ["--tokenizer", "tokenizer.json", "--save-every", "4", "--profile", "1", "--tensorboard"]
    run = ["train", *SIZES, *read, "--steps", "4", "--out"]
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*run, "tokens", "--data", "tokens.npy"]) == 0
    told = capsys.readouterr().out
    assert_fits(told, 80)
    assert f"tokens=300), {gpt.num_params(CONFIG):,} parameters" in told
    manifest = read_manifest(folder / "tokens/checkpoints/4")
    assert manifest.leaves["params/embed"].shape == (300, 32), "no row for nothing"
    # A text and its tokens are learnt alike; a uniform guess costs log2(300) bits a token.
    monkeypatch.setenv("COLUMNS", "120")
    assert main([*run, "text", "--data", "../text.txt"]) == 0
    assert_fits(capsys.readouterr().out, 120)
    found, other = lines_of(folder / "tokens"), lines_of(folder / "text")
    assert [x.get("loss") for x in found] == [x.get("loss") for x in other]
    held_out = tokenizer.encode([text])[-round(0.05 * tokenizer.encode([text]).size) :]
    guess = math.log2(300) * held_out.size / tokenizer.num_bytes(held_out)
    assert found[0]["validation_bits_per_byte"] == pytest.approx(guess, rel=0.05)

    assert list((folder / "tokens/profile").rglob("*.xplane.pb"))
    (events,) = (folder / "tokens/tensorboard").iterdir()
    assert scalars(events) == sum(len(line) - 1 for line in found)


def assert_fits(told, columns):
    """See that a terminal shows the table of bytes whole."""
    table = told[told.index("bytes per device") : told.index("theory: whole / N")]
    assert "…" not in table
    assert "parameters " in table
    assert max(map(len, table.splitlines())) <= columns


def scalars(path):
    """Count the scalars of a TensorBoard file: records of a length, 4 bytes, data, 4 bytes."""
    data, count = path.read_bytes(), 0
    while data:
        size = int.from_bytes(data[:8], "little")
        count += len(Event.FromString(data[12 : 12 + size]).summary.value)
        data = data[16 + size :]
    return count


def test_what_cannot_be_recorded_is_refused(folder, capsys):
    assert main(["train", *SIZES, "--profile", "3", "--steps", "4"]) == 2
    assert "--profile 3 records after two steps: give more --steps" in capsys.readouterr().err


def test_sizes_hold_for_plans_as_well(capsys):
    asked = ["plan", "--model", "gpt2-small", "--layers", "6", "--width", "512", "--heads", "8"]
    assert main([*asked, "--stage", "2"]) == 0
    assert "6 layers of width 512" in capsys.readouterr().out


def test_devices_that_say_what_they_do_are_measured():
    kind = HARDWARE["h100"].device_kinds[0]
    stats = ({"peak_bytes_in_use": n} for n in (7, 9))
    devices = [
        SimpleNamespace(device_kind=kind, process_index=0, memory_stats=lambda one=one: one)
        for one in stats
    ]
    found = measure(CONFIG, devices, "bf16", 1e6)
    flops = 6 * gpt.num_params(CONFIG) + 12 * 2 * 32 * 16
    assert found["mfu"] == round(1e6 * flops / (2 * HARDWARE["h100"].flops), 4)
    assert found["peak_bytes"] == 9
    silent = SimpleNamespace(device_kind="cpu", process_index=0, memory_stats=lambda: None)
    assert measure(CONFIG, [silent], "fp32", 1e6) == {}
