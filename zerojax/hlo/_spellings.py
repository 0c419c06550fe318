"""What compilers call things: every name that is treated specially, and a line in which it stands.

Marks are what one compiler leaves where HLO has no word of its own; `OPCODES` are HLO's own words.
Lines are shortened; libtpu 0.0.42 and the CUDA 12 plugin are those of jax 0.10.2.
"""

import re
import tomllib
from importlib import resources

# A reduce-scatter: the computation all-reduces, and keeps one part (libtpu, v6e:2x4).
#   %fusion.66 = bf16[512,1024] fusion(%x), kind=kCustom, calls=%all-reduce-scatter.2
SCATTER = re.compile(r"calls=%?all-reduce-scatter|AllReduceScatterFusion")

# A gather (ag) or reduce-scatter (rs) as permutes that overlap a matmul (libtpu, v5p:2x2x2).
#   %while.5 = bf16[4096,128] while(%x), body=%wide.windowed_dot_general_body_rs.1.clone.sunk
WINDOW = re.compile(r"windowed_dot_general_body_(ag|rs)")

# An end of an asynchronous collective within a fusion: its start counts, its Done repeats it, and
# so does each fusion that runs beside it (libtpu, v5e:4x4).
#   %c = bf16[8] custom-call(%all-gather.21), custom_call_target="AsyncCollectiveStart"
#   %fusion.61 = bf16[1024,4096] fusion(%x), kind=kOutput, calls=%async_collective_fusion.61
ASYNC_END = re.compile(r'custom_call_target="AsyncCollective(Start|Done)"')
ASYNC_BESIDE = re.compile(r"\basync_collective_fusion")

# What the compiler takes an instruction to cost; GPUs and CPUs write none (libtpu, v6e:2x4).
#   fusion(%x), backend_config={"window_config":{"estimated_cycles":"36864","is_mask":false}}
CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')

# An instruction that the compiler itself runs again to save memory (libtpu, v5p:4x4x4).
#   %fusion.12.remat2 = bf16[4096,2048] fusion(%x), kind=kLoop, calls=%fused_computation
REMATERIALISED = re.compile(r"\.remat(?!ted)")

# How often a loop runs; TPUs write none (CUDA 12 plugin; CPU of jaxlib).
#   while(%x), body=%b, backend_config={"known_trip_count":{"n":"6"}}
TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')

# A transfer between TPU slices: between which, and of which collective (v5e:2x2x2slices).
#   send(%x, %t), frontend_attributes={_xla_megascale_target="{1,2}x{0:3}",
#       _xla_megascale_transfer_type="ALL_REDUCE"}
BETWEEN_SLICES = re.compile(
    r'_xla_megascale_target="\{([\d,]+)\}x.*_xla_megascale_transfer_type="(\w+)"'
)

# What a send and its recv have in common (v5e:4x4x2slices).
#   recv(%t), frontend_attributes={_xla_host_transfer_rendezvous="all-reduce.159_0"}
TRANSFER = "_xla_host_transfer_rendezvous"

# A transfer to a callback on the host: no collective (CPU of jaxlib).
#   %send = (f32[8], u32[], token[]) send(%x, %t), channel_id=1, is_host_transfer=true
CALLBACK = re.compile(r"is_host_transfer=true")

# A tensor in the host's memory (libtpu, v5p:2x2x2; CUDA 12 plugin).
#   %c = (f32[8]{0:S(5)}, f32[8]{0}, u32[]) copy-start(%x)
HOST_MEMORY = re.compile(r"S\(5\)")

# What the host computes: while a TPU goes on, or where a GPU or a CPU calls it.
#   custom-call-start(%x), async_execution_thread="host", called_computations={%there}
#   custom-call(%x), custom_call_target="HostExecute"
HOST_COMPUTES = re.compile(r'async_execution_thread="host"|HostExecute')

# A library that communicates: never clean, since nobody knows what it moves (XLA of 2021).
#   custom-call(%x), custom_call_target="__nccl$AllReduce"
LIBRARY_CALL = re.compile(
    r'(?i)custom_call_target="(?!AsyncCollective(?:Start|Done)")[^"]*'
    r"(?:nccl|nvshmem|collective|all_?gather|all_?reduce|megascale)"
)

OPCODES = tomllib.loads(resources.files("zerojax.hlo").joinpath("opcodes.toml").read_text("utf-8"))


def having(trait: str) -> frozenset[str]:
    return frozenset(OPCODES[trait].split())
