"""Where everything lies in the embedded trainer's regions, from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rllaunch.backends.base import LaunchContext, TensorSlice
from rllaunch.backends.embedded.batch import batch_layout
from rllaunch.backends.embedded.layout import Layout, dtype_name, lay_out
from rllaunch.backends.embedded.model import build_critic, build_model

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class TrainerLayouts:
    """The trainer's regions.

    Gradients and moments are float32 whatever the parameters are. Parameters narrower than that have their
    float32 `main` copy beside the moments: a step of a usual size is smaller than bf16's rounding (at a learning
    rate of 1e-6 a bf16 model stood still, all but 0.1% of its parameters).
    """

    params: Layout
    grads: Layout
    optimizer: Layout
    activations: Layout
    trainable: tuple[str, ...]
    """Names with a gradient, in the order of `grads`."""
    sent: tuple[TensorSlice, ...]
    """What an update sends: of the actor, all that is trainable, in the engine's dtype; offsets in `params`."""


def trainer_layouts(context: LaunchContext) -> TrainerLayouts:
    models = build_models(context, device="meta")
    groups: dict[str, list[tuple[str, Tensor]]] = {}
    for role, model in models.items():
        for name, parameter in model.named_parameters():
            group = f"{role} {dtype_name(parameter.dtype)}" + ("" if parameter.requires_grad else " frozen")
            groups.setdefault(group, []).append((f"{role}.{name}", parameter))
    trainable = {
        group: [(n, torch.empty(p.shape, dtype=torch.float32, device="meta")) for n, p in members]
        for group, members in groups.items()
        if not group.endswith("frozen")
    }
    params, grads = lay_out(groups.items()), lay_out(trainable.items())
    optimizer = lay_out(
        (f"{group} {part}", [(f"{part}.{n}", p) for n, p in members])
        for group, members in trainable.items()
        for part in (*MOMENTS, *(() if group.endswith(" float32") else ("main",)))
    )
    actor = {n for group, members in trainable.items() if group.startswith("actor ") for n, _ in members}
    return TrainerLayouts(
        params,
        grads,
        optimizer,
        batch_layout(context),
        tuple(n for members in trainable.values() for n, _ in members),
        tuple(s for s in params.slices if s.name in actor),
    )


def build_models(context: LaunchContext, *, device: str = "cpu") -> dict[str, nn.Module]:
    """role → model: the actor, with KL the frozen reference, with PPO the critic; all from the same start."""
    models: dict[str, nn.Module] = {"actor": build_model(context, device=device)}
    if context.config.algorithm.kl_loss_coef > 0:
        models["reference"] = build_model(context, device=device, with_lora=False).requires_grad_(False)
    if context.config.has_critic:
        models["critic"] = build_critic(context, device=device).requires_grad_(True)
    return models
