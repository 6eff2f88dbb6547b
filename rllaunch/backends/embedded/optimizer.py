"""AdamW over the embedded trainer's flat regions."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rllaunch.algo.steps import lr_at
from rllaunch.backends.embedded.pool import FlatBuffer
from rllaunch.backends.embedded.trainer_layouts import MOMENTS, TrainerLayouts
from rllaunch.plan.handoff import Region
from rllaunch.resolve.schema import LaunchConfig


class FlatAdamW:
    """AdamW over one flat float32 parameter a segment; its moments are views of the `optimizer` region.

    Args:
        buffers: `params` with the models' values, `optimizer` zeroed, and `grads`; they must be allocated.
    """

    def __init__(self, config: LaunchConfig, layouts: TrainerLayouts, buffers: Mapping[Region, FlatBuffer]) -> None:
        self._config = config
        self.num_steps = 0
        trainer, algorithm = config.trainer, config.algorithm
        state = {s.group: s.view(buffers["optimizer"]) for s in layouts.optimizer.segments}
        values = {s.group: s.view(buffers["params"]) for s in layouts.params.segments}
        self.grads = [s.view(buffers["grads"]) for s in layouts.grads.segments]
        self._narrow: list[tuple[Tensor, Tensor]] = []
        groups, flats = [], {}
        for segment, grad in zip(layouts.grads.segments, self.grads, strict=True):
            group = segment.group
            main = state.get(f"{group} main")
            if main is None:
                main = values[group]
            else:
                main.copy_(values[group])
                self._narrow.append((values[group], main))
            flat = nn.Parameter(main, requires_grad=True)
            flat.grad = grad
            flats[group] = flat
            lr = algorithm.critic_lr or trainer.lr if group.startswith("critic ") else trainer.lr
            groups.append({"params": [flat], "base_lr": lr})
        self.adam = torch.optim.AdamW(
            groups,
            lr=trainer.lr,
            betas=(trainer.adam_beta1, trainer.adam_beta2),
            eps=trainer.adam_eps,
            weight_decay=trainer.weight_decay,
        )
        for group, flat in flats.items():
            moments = {name: state[f"{group} {name}"] for name in MOMENTS}
            self.adam.state[flat] = {"step": torch.tensor(0.0), **moments}

    @property
    def lr(self) -> float:
        """Of the last step, the actor's."""
        lr: float = self.adam.param_groups[0]["lr"]
        return lr

    def zero_grad(self) -> None:
        for grad in self.grads:
            grad.zero_()

    def clip(self) -> Tensor:
        """The norm of all gradients, which are scaled down where it is above `clip_grad`."""
        norm: Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in self.grads]))
        limit = self._config.trainer.clip_grad
        if limit > 0 and norm > limit:
            for grad in self.grads:
                grad.mul_(limit / (norm + 1e-6))
        return norm

    def step(self) -> None:
        self._set_lr()
        self.adam.step()
        for values, main in self._narrow:
            values.copy_(main)
        self.num_steps += 1

    def _set_lr(self) -> None:
        trainer, run = self._config.trainer, self._config.run
        total = trainer.lr_decay_iters or run.num_rollout * (trainer.num_steps_per_rollout or 1)
        for group in self.adam.param_groups:
            group["lr"] = lr_at(
                self.num_steps,
                group["base_lr"],
                trainer.lr_warmup_iters,
                total,
                trainer.lr_decay_style,
                trainer.min_lr,
            )

    def resume_at(self, num_steps: int) -> None:
        """Go on after `num_steps` steps; what the regions hold is another's to fill."""
        self.num_steps = num_steps
        for state in self.adam.state.values():
            state["step"].fill_(num_steps)


def accumulate_into(parameter: nn.Parameter, grad: Tensor) -> None:
    """Make backward add the parameter's gradient to `grad`, which is float32 and a view of the region."""
    if parameter.dtype == grad.dtype:
        parameter.grad = grad
        return

    def add(of: Tensor) -> None:
        assert of.grad is not None, "called when a gradient was accumulated"
        grad.add_(of.grad)
        of.grad = None

    parameter.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]
