"""What compilers call things: every name that is treated specially, and a line in which it stands.

`SPELLINGS` are the marks that one compiler leaves where HLO has no word of its own; `OPCODES` are
HLO's own words. Lines are shortened; libtpu 0.0.42 and the CUDA 12 plugin are those of jax 0.10.2.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TPU, _GPU, _CPU = "libtpu 0.0.42", "CUDA 12 plugin of jax 0.10.2", "CPU of jaxlib 0.10.2"


@dataclass(frozen=True)
class Spelling:
    """Hold one mark."""

    means: str  # what a line that bears it is read as
    mark: re.Pattern[str]  # the pattern; its group, if any, is what is read
    seen: str  # the compiler that wrote the line
    line: str  # of HLO


SPELLINGS: dict[str, Spelling] = {
    "scatter": Spelling(
        "a reduce-scatter: the computation all-reduces, and keeps one part",
        re.compile(r"calls=%?all-reduce-scatter|AllReduceScatterFusion"),
        f"{_TPU}, v6e:2x4",
        "%fusion.66 = bf16[512,1024]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.2, "
        'backend_config={"collective_algorithm_config":{"emitter":"AllReduceScatterFusion"}}',
    ),
    "window": Spelling(
        "a gather (ag) or reduce-scatter (rs) as permutes that overlap a matmul",
        re.compile(r"windowed_dot_general_body_(ag|rs)"),
        f"{_TPU}, v5p:2x2x2",
        "%while.5 = bf16[4096,128]{0,1} while(%x), condition=%windowed_dot_general_cond_rs.1, "
        "body=%wide.windowed_dot_general_body_rs.1.clone.sunk",
    ),
    "async end": Spelling(
        "an end of an asynchronous collective within a fusion: its start counts, Done repeats it",
        re.compile(r'custom_call_target="AsyncCollective(Start|Done)"'),
        f"{_TPU}, v5e:4x4",
        "%custom-call.6 = bf16[1,4096,1024]{2,1,0} custom-call(%all-gather.21), "
        'custom_call_target="AsyncCollectiveStart"',
    ),
    "async beside": Spelling(
        "a fusion that runs beside it, which repeats the collective too",
        re.compile(r"\basync_collective_fusion"),
        f"{_TPU}, v5e:4x4",
        "%fusion.61 = bf16[1024,4096]{1,0} fusion(%x), kind=kOutput, "
        "calls=%async_collective_fusion.61",
    ),
    "blocking": Spelling(
        "a start that waits at once",
        re.compile(r'"is_sync":true'),
        f"{_GPU}, h100:1x8",
        "%all-gather-start = (f32[8]{0}, f32[16]{0}) all-gather-start(%x), replica_groups={}, "
        'dimensions={0}, backend_config={"collective_backend_config":{"is_sync":true}}',
    ),
    "cycles": Spelling(
        "what the compiler takes an instruction to cost; GPUs and CPUs write none",
        re.compile(r'"estimated_cycles":"(\d+)"'),
        f"{_TPU}, v6e:2x4",
        "%fusion.51 = bf16[4096,2048]{1,0} fusion(%x), kind=kOutput, calls=%fused_computation.3, "
        'backend_config={"window_config":{"estimated_cycles":"36864","is_mask":false}}',
    ),
    "rematerialised": Spelling(
        "an instruction that the compiler itself runs again to save memory",
        re.compile(r"\.remat(?!ted)"),
        f"{_TPU}, v5p:4x4x4",
        "%fusion.12.remat2 = bf16[4096,2048]{1,0} fusion(%x), kind=kLoop, calls=%fused_computation",
    ),
    "trip count": Spelling(
        "how often a loop runs; TPUs write none",
        re.compile(r'"known_trip_count":\{"n":"(\d+)"\}'),
        f"{_GPU} and {_CPU}",
        "%while.43 = (s32[], f32[8]{0}) while(%x), condition=%c, body=%b, "
        'backend_config={"known_trip_count":{"n":"6"},"known_init_step":{"init":"0","step":"1"}}',
    ),
    "between slices": Spelling(
        "a transfer between TPU slices: between which, and of which collective",
        re.compile(r'_xla_megascale_target="\{([\d,]+)\}x.*_xla_megascale_transfer_type="(\w+)"'),
        f"{_TPU}, v5e:2x2x2slices",
        "%send = (bf16[8,128]{1,0}, u32[], token[]) send(%x, %after-all), channel_id=3, "
        'is_host_transfer=true, frontend_attributes={_xla_megascale_target="{1,2}x{0:3}",'
        '_xla_megascale_transfer_type="ALL_REDUCE"}',
    ),
    "callback": Spelling(
        "a transfer to a callback on the host: no collective",
        re.compile(r"is_host_transfer=(true)"),
        f"{_CPU}",
        "%send = (f32[8]{0}, u32[], token[]) send(%x, %t), channel_id=1, is_host_transfer=true",
    ),
    "host memory": Spelling(
        "a tensor in the host's memory",
        re.compile(r"S\(5\)"),
        f"{_TPU}, v5p:2x2x2; {_GPU}",
        "%c = (f32[8]{0:S(5)}, f32[8]{0}, u32[]) copy-start(%x)",
    ),
    "host thread": Spelling(
        "what the host computes while the device goes on",
        re.compile(r'async_execution_thread="host"'),
        f"{_TPU}, v5p:2x2x2",
        "%s = (f32[8]{0}, f32[8]{0}, u32[]) custom-call-start(%x), "
        'async_execution_thread="host", called_computations={%there}',
    ),
    "host call": Spelling(
        "what the host computes",
        re.compile(r"HostExecute"),
        f"{_GPU}; {_CPU}",
        '%s = f32[8]{0} custom-call(%x), custom_call_target="HostExecute"',
    ),
    "library call": Spelling(
        "a library that communicates: never clean, since nobody knows what it moves",
        re.compile(
            r'custom_call_target="([^"]*(?:nccl|nvshmem|collective|all_?gather|all_?reduce|megascale)'
            r'[^"]*)"',
            re.IGNORECASE,
        ),
        "XLA of 2021, before async collectives",
        '%c = f32[8]{0} custom-call(%x), custom_call_target="__nccl$AllReduce"',
    ),
}

#: Opcodes that are treated specially, what they do, and a line; see `having` for what is asked.
#:     moves       a collective
#:     keeps       the same values, in another place, shape or dtype
#:     hands on    computes nothing with its operand
#:     whole       hands on a tuple as it is
#:     no buffer   its result is, or lies in, another's buffer
#:     stays       moves nothing between memories, or is counted at its other end
OPCODES: tuple[tuple[str, frozenset[str], str], ...] = tuple(
    (opcode, frozenset(traits.split(", ")), line)
    for opcode, traits, line in (
        ("all-gather", "moves", "%a = f32[16]{0} all-gather(%x), dimensions={0}"),
        ("all-reduce", "moves", "%a = f32[8]{0} all-reduce(%x), to_apply=%add"),
        ("reduce-scatter", "moves", "%a = f32[4]{0} reduce-scatter(%x), dimensions={0}"),
        ("all-to-all", "moves", "%a = f32[8]{0} all-to-all(%x), dimensions={0}"),
        ("ragged-all-to-all", "moves", "%a = f32[8]{0} ragged-all-to-all(%x, %o, %i, %s)"),
        ("collective-permute", "moves", "%a = f32[8]{0} collective-permute(%x)"),
        ("collective-broadcast", "moves", "%a = f32[8]{0} collective-broadcast(%x)"),
        ("bitcast", "keeps, hands on, no buffer, stays", "%b = f32[2,4]{1,0} bitcast(%x)"),
        ("convert", "keeps, hands on", "%c = bf16[8]{0} convert(%x)"),
        ("copy", "keeps, hands on", "%c = f32[8]{0} copy(%x)"),
        ("copy-start", "keeps, hands on", "%c = (f32[8]{0}, f32[8]{0}, u32[]) copy-start(%x)"),
        ("copy-done", "keeps, hands on, whole, no buffer, stays", "%c = f32[8]{0} copy-done(%s)"),
        ("reshape", "keeps, hands on", "%r = f32[2,4]{1,0} reshape(%x)"),
        ("opt-barrier", "keeps, hands on, whole, no buffer, stays", "%o = f32[8] opt-barrier(%x)"),
        ("bitcast-convert", "hands on", "%b = u32[8]{0} bitcast-convert(%x)"),
        ("broadcast", "hands on", "%b = f32[8,4]{1,0} broadcast(%x), dimensions={0}"),
        ("slice", "hands on", "%s = f32[4]{0} slice(%x), slice={[0:4]}"),
        ("transpose", "hands on", "%t = f32[4,8]{1,0} transpose(%x), dimensions={1,0}"),
        ("all-gather-done", "hands on, whole, no buffer", "%d = f32[16]{0} all-gather-done(%s)"),
        ("all-reduce-done", "no buffer", "%d = f32[8]{0} all-reduce-done(%s)"),
        ("parameter", "no buffer, stays", "%p = f32[8]{0} parameter(0)"),
        ("constant", "no buffer, stays", "%c = s32[] constant(7)"),
        ("iota", "no buffer", "%i = s32[8]{0} iota(), iota_dimension=0"),
        ("tuple", "no buffer, stays", "%t = (f32[8]{0}, s32[]) tuple(%x, %c)"),
        ("get-tuple-element", "no buffer, stays", "%g = s32[] get-tuple-element(%t), index=1"),
        ("while", "no buffer, stays", "%w = (s32[]) while(%t), condition=%c, body=%b"),
        ("conditional", "no buffer, stays", "%c = f32[8] conditional(%p, %x, %x)"),
        ("call", "no buffer, stays", "%c = f32[8]{0} call(%x), to_apply=%there"),
        ("after-all", "no buffer, stays", "%a = token[] after-all()"),
        ("partition-id", "no buffer, stays", "%p = u32[] partition-id()"),
        ("async-start", "stays", "%a = (f32[8], f32[8], u32[]) async-start(%x), calls=%there"),
        ("async-update", "no buffer, stays", "%a = (f32[8], f32[8], u32[]) async-update(%s)"),
        ("async-done", "no buffer", "%a = f32[8]{0} async-done(%s), calls=%there"),
        ("call-start", "stays", "%c = ((f32[8]), f32[16]) call-start(%x), to_apply=%there"),
        ("call-done", "no buffer", "%d = f32[16]{0} call-done(%c)"),
        ("custom-call-done", "stays", "%d = f32[8]{0} custom-call-done(%s)"),
    )
)


def having(trait: str) -> frozenset[str]:
    """Return the opcodes that have a trait."""
    return frozenset(opcode for opcode, traits, _ in OPCODES if trait in traits)
