"""One process of torch: DDP, ZeroRedundancyOptimizer, FSDP2 or DeepSpeed, over gloo.

python benchmarks/torch_ways.py WAY RANK PROCESSES PORT fp32    # see WAYS; reads work.serve
"""

from __future__ import annotations

import os
import sys
import time

START = time.perf_counter()

if __name__ == "__main__":
    rank, world, port, precision = sys.argv[2:6]
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu"}

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import work

SIZE, IS_BF16 = work.Size(), sys.argv[5:] == ["bf16"]
ADAMW = {"lr": work.LEARNING_RATE, "eps": work.EPS, "weight_decay": work.WEIGHT_DECAY}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        d = SIZE.width
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.fc, self.out = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.ln1(x)).unflatten(-1, (3, SIZE.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # [B, H, T, D/H]
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.out(functional.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(SIZE.vocab, SIZE.width)
        self.wpe = nn.Embedding(SIZE.tokens, SIZE.width)
        self.blocks = nn.ModuleList(Block() for _ in range(SIZE.layers))
        self.lnf = nn.LayerNorm(SIZE.width)
        with torch.no_grad():
            for name, value in work.weights(SIZE):
                self.get_parameter(name).copy_(torch.from_numpy(value))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens[:, :-1]) + self.wpe.weight
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.lnf(x), self.wte.weight)
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class Way:
    """A model and its optimizer, and what they hold; a subclass wraps them.

    In bf16 weights are kept in fp32, and cast where they are used.
    """

    casts = IS_BF16

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self.model, self.optimizer = self.wrapped(Gpt())

    def wrapped(self, model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        raise NotImplementedError

    def backward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.casts):
            loss = self.model(tokens)
        loss.backward()
        return loss

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def states(self) -> Any:
        return self.optimizer.state

    def step(self, batch: np.ndarray) -> float:
        loss = self.backward(torch.from_numpy(batch))
        self.grads = _bytes(self.gradients())
        self.update()
        return loss.item()

    def gradients(self) -> Iterable[Any]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def held(self) -> dict[str, int]:
        states = [x for state in self.states().values() for x in state.values()]
        return {
            "params": _bytes(self.model.parameters()),
            "grads": self.grads,
            "opt": _bytes(x for x in states if torch.is_tensor(x)),
        }


class Ddp(Way):
    def wrapped(self, model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        return model, self.optimizer_of(model)

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)


class Zero1(Ddp):
    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        kind = torch.optim.AdamW
        return ZeroRedundancyOptimizer(model.parameters(), kind, **ADAMW, fused=True)

    def states(self) -> Any:
        return self.optimizer.optim.state


class Fsdp(Way):
    reshard, casts = True, False

    def wrapped(self, model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if IS_BF16 else None)
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh, reshard_after_forward=self.reshard, mp_policy=policy)
        return model, torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)


class FsdpKept(Fsdp):
    reshard = False


class DeepSpeed(Way):
    def __init__(self, stage: int) -> None:
        import logging

        logging.disable(logging.INFO)
        import deepspeed

        self.stage = stage
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        model = Gpt()
        config = {
            "train_micro_batch_size_per_gpu": SIZE.batch,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": IS_BF16},
            "gradient_clipping": 0.0,  # 1.0 unless told
            "steps_per_print": 10**9,
        }
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)
        made = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self.model, self.optimizer = made[:2]

    def backward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = self.model(tokens)
        self.model.backward(loss)
        return loss

    def update(self) -> None:
        self.model.step()

    def gradients(self) -> Iterable[Any]:
        """Return this process's part, which DeepSpeed keeps in attributes of its own."""
        if hasattr(self.optimizer, "grad_partitions_flat_buffer"):
            return [self.optimizer.grad_partitions_flat_buffer]
        groups = self.optimizer.averaged_gradients.values()
        return [x for group in groups for x in group or ()]

    def states(self) -> Any:
        """Return the moments, and the masters that it keeps in fp32 too."""
        kept = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
        masters = [x for name in kept for x in getattr(self.optimizer, name, ())]
        return {**self.optimizer.optimizer.state, "masters": dict(enumerate(masters))}


def _bytes(tensors: Iterable[Any]) -> int:
    """Count the bytes of tensors that this process holds; storage that two share counts once."""
    found = {}
    for x in tensors:
        local = x.to_local() if hasattr(x, "to_local") else getattr(x, "ds_tensor", x)
        found[local.data_ptr(), local.numel()] = local.numel() * local.element_size()
    return sum(found.values())


WAYS: dict[str, Callable[[], Way]] = {
    "ddp": Ddp,
    "zero1": Zero1,
    "fsdp2-kept": FsdpKept,
    "fsdp2": Fsdp,
    "deepspeed1": lambda: DeepSpeed(1),
    "deepspeed2": lambda: DeepSpeed(2),
    "deepspeed3": lambda: DeepSpeed(3),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    way = WAYS[sys.argv[1]]()
    work.serve(int(sys.argv[2]), SIZE, START, way.step, way.held)
