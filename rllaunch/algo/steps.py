"""Optimizer steps: which samples are in each, and at what learning rate it is taken."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def step_orders(num_samples: int, steps: int, seed: int, rollout_id: int) -> list[Tensor]:
    """Which samples are in which optimizer step: by seed and rollout alone, so that a resumed run repeats it."""
    rng = np.random.Generator(np.random.Philox(key=[seed, (2 << 32) + rollout_id]))
    return list(torch.from_numpy(rng.permutation(num_samples)).chunk(steps))


def lr_at(step: int, peak: float, warmup: int, total: int, style: str, floor: float) -> float:
    """The learning rate of optimizer step `step` (0-based): linear warm-up, then the decay that was asked for."""
    if step < warmup:
        return peak * (step + 1) / warmup
    if style == "constant":
        return peak
    share = min(1.0, (step - warmup) / max(1, total - warmup))
    fall = 1.0 - share if style == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))
    return floor + (peak - floor) * fall
