"""What Megatron-core 0.16.1 hard-codes to CUDA, sent to the CPU. For tests only; call `use_cpu` before building anything.

The places it asks for CUDA, none of which an option covers: tensor_parallel/random.py (random states),
rotary_pos_embedding.py, router.py, mappings.py (torch.cuda.current_device()), param_and_grad_buffer.py, optimizer.py,
clip_grads.py, schedules.py (device="cuda"), and tests for the type "torch.cuda.FloatTensor".
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_active: list[Any] = []


class _CudaIsCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1:
            return func(*args, **kwargs).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def use_cpu() -> None:
    """Once a process, before anything is built."""
    if not _active:
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
        torch.cuda.synchronize = lambda *a, **k: None  # type: ignore[assignment]
        torch.cuda.current_stream = lambda *a, **k: None  # type: ignore[assignment]
        from megatron.core.tensor_parallel import random

        random._get_cuda_rng_state = random._set_cuda_rng_state = lambda *a, **k: None
        _active.append(_CudaIsCpu())
        _active[0].__enter__()
