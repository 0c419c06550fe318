"""Where an instruction comes from: its line of the program, not of a library that it calls."""

from __future__ import annotations

import pytest

from zerojax.hlo import parse_module

FRAMES = """HloModule jit_step

FileNames
1 "/home/me/train.py"
2 "/venv/lib/python3.12/site-packages/optax/_src/update.py"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=0 end_column=9}
2 {file_name_id=2 function_name_id=2 line=42 end_line=42 column=0 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=2 parent_frame_id=1}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8] parameter(0)
  ROOT %y = f32[8] negate(%x), metadata={op_name="jit(step)/neg" stack_frame_id=FRAME}
}
"""


@pytest.mark.parametrize(
    ("frame", "told"), [(2, "/home/me/train.py:7"), (3, "site-packages/optax/_src/update.py:42")]
)
def test_the_line_of_a_library_is_that_of_its_caller(frame, told):
    module = parse_module(FRAMES.replace("FRAME", str(frame)))
    assert module.source(module.entry.root).endswith(told)
