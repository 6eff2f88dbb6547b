"""Low-rank adapters on linear layers: wrap a model in place, train only them, merge them for the handoff."""

# R rank, I input features, O output features

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ALL_LINEAR = "all-linear"

# The name PEFT gives the wrapped layer. A plain model hardly has a module of that name, so a key can be
# mapped back by its text alone.
_BASE = "base_layer"


class LoraLinear(nn.Module):
    """A frozen nn.Linear plus a trained low-rank term: base(x) + alpha / rank * (x A^T) B^T.

    B starts at 0, so the wrapped layer first computes what the plain one does. A is drawn on the CPU and then
    moved: one seed gives the same adapter on every device and every rank. The adapter is float32 over
    a bf16 or fp16 base, where steps of a usual size would be rounded away; the output has the base's dtype.

    Args:
        base: becomes frozen, weight and bias.
        rank: R, at least 1.
        alpha: the term is scaled by alpha / rank.
        generator: a CPU generator; torch's global one where it is None.
    Raises:
        ValueError: `rank` is below 1.
    Source: Hu et al., arXiv:2106.09685 section 4.1; A as in PEFT, src/peft/tuners/lora/layer.py@5d602fd.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float, generator: torch.Generator | None = None) -> None:
        super().__init__()
        if rank < 1:
            raise ValueError(f"LoRA rank = {rank}: must be at least 1")
        self.in_features = base.in_features
        self.out_features = base.out_features
        self.rank = rank
        self.scale = alpha / rank
        self.base_layer = base.requires_grad_(False)
        dtype = base.weight.dtype if base.weight.itemsize >= 4 else torch.float32
        a_RI = _draw(rank, base.in_features, dtype, generator)
        b_OR = torch.zeros(base.out_features, rank, dtype=dtype, device=base.weight.device)
        self.lora_a = nn.Parameter(a_RI.to(base.weight.device))
        self.lora_b = nn.Parameter(b_OR)

    def forward(self, x: Tensor) -> Tensor:
        plain: Tensor = self.base_layer(x)
        low_rank = F.linear(F.linear(x.to(self.lora_a.dtype), self.lora_a), self.lora_b)
        return plain + (self.scale * low_rank).to(plain.dtype)

    def merged_weight(self) -> Tensor:
        """Weight of the plain layer that computes the same, [O, I], in the base's dtype, without gradient."""
        with torch.no_grad():
            delta_OI = self.scale * (self.lora_b @ self.lora_a)
            return (self.base_layer.weight.to(delta_OI.dtype) + delta_OI).to(self.base_layer.weight.dtype)

    def extra_repr(self) -> str:
        return f"rank={self.rank}, scale={self.scale}"


def _draw(rank: int, in_features: int, dtype: torch.dtype, generator: torch.Generator | None) -> Tensor:
    a_RI = torch.empty(rank, in_features, dtype=dtype)
    return nn.init.kaiming_uniform_(a_RI, a=math.sqrt(5), generator=generator)


def plain_name(key: str) -> str | None:
    """What the plain model calls a wrapped model's parameter or state-dict key; None for an adapter's own.

    `layers.0.q_proj.base_layer.weight` gives `layers.0.q_proj.weight`; a key outside adapters is unchanged.
    """
    *path, leaf = key.split(".")
    if leaf in ("lora_a", "lora_b"):
        return None
    if path and path[-1] == _BASE:
        path.pop()
    return ".".join([*path, leaf])


def apply_lora(
    model: nn.Module, rank: int, alpha: float, target_modules: str | Sequence[str], *, seed: int = 0
) -> list[str]:
    """Names of the linear layers that now carry an adapter, in the model's order; all else is frozen.

    The model is changed in place, and not at all if this raises.

    Args:
        target_modules: last components of layer names (`q_proj`), or "all-linear": every nn.Linear
            except `lm_head`.
        seed: draws the A matrices, without touching torch's global generator.
    Raises:
        ValueError: a target matches no linear layer (the text lists those there are), the model carries
            adapters already, a target's weight is shared with another layer, or `rank` is below 1.
    """
    if rank < 1:
        raise ValueError(f"LoRA rank = {rank}: must be at least 1")
    wrapped = [name for name, module in model.named_modules() if isinstance(module, LoraLinear)]
    if wrapped:
        raise ValueError(f"the model carries LoRA adapters already ({wrapped[0]} and {len(wrapped) - 1} more)")
    targets = [target_modules] if isinstance(target_modules, str) else list(target_modules)
    chosen = _matching_linears(model, targets)
    _refuse_shared_weights(model, chosen)

    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, linear in chosen.items():
        parent_name, _, child_name = name.rpartition(".")
        setattr(model.get_submodule(parent_name), child_name, LoraLinear(linear, rank, alpha, generator))
    return list(chosen)


def drawn_again(model: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Name and A of every adapter in the order `apply_lora` drew them: for a model on `meta`, which has no values.

    Args:
        seed: that `apply_lora` was given.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield name, _draw(module.rank, module.in_features, module.lora_a.dtype, generator)


def merged_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """State dict of the plain model with every adapter added into its layer's weight.

    Keys, order, shapes and dtypes are the plain model's, so it loads strictly. Only the merged weights are
    new memory; every other tensor is the model's own.
    """
    merged_by_key = {
        ".".join(filter(None, (name, _BASE, "weight"))): module.merged_weight()
        for name, module in model.named_modules()
        if isinstance(module, LoraLinear)
    }
    state: dict[str, Tensor] = {}
    for key, tensor in model.state_dict().items():
        plain_key = plain_name(key)
        if plain_key is not None:
            state[plain_key] = merged_by_key.get(key, tensor)
    return state


def _matching_linears(model: nn.Module, targets: Sequence[str]) -> dict[str, nn.Linear]:
    # Subclasses are left alone: quantised layers hold no weight to add to, and torch's own attention
    # reads its projection's weight without calling it. The root has no parent to be replaced in.
    linear_by_name = {name: m for name, m in model.named_modules() if name and type(m) is nn.Linear}
    last_of = {name: name.rpartition(".")[2] for name in linear_by_name}
    available = sorted(set(last_of.values()))
    if ALL_LINEAR in targets:
        targets = [*targets, *(last for last in available if last != "lm_head")]
    unmatched = [t for t in targets if t not in available and t != ALL_LINEAR]
    chosen = {name: linear for name, linear in linear_by_name.items() if last_of[name] in targets}
    if unmatched or not chosen:
        missed = ", ".join(unmatched or targets) or "an empty list"
        raise ValueError(
            f"LoRA target_modules: no linear layer is named {missed}; "
            f"this model's linear layers: {', '.join(available) or 'none'}"
        )
    return chosen


def _refuse_shared_weights(model: nn.Module, chosen: dict[str, nn.Linear]) -> None:
    names_by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_by_id.setdefault(id(parameter), []).append(name)
    for linear in chosen.values():
        names = names_by_id[id(linear.weight)]
        if len(names) > 1:
            raise ValueError(
                f"LoRA cannot adapt {names[-1]}: it is the same tensor as {names[0]}, and merging would "
                "change both; leave it out of target_modules or untie the two"
            )
