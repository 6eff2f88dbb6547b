"""Processes, model, gradients and optimizer as Megatron-core sets them up, with all state there from the start."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer
from torch import Tensor

from rllaunch.backends.base import LaunchContext, RankInfo
from rllaunch.backends.embedded.model import model_config
from rllaunch.backends.megatron.critic import critic_entries, put_value_head
from rllaunch.backends.megatron.lora import Adapters, freeze_and_adapt
from rllaunch.backends.megatron.model import build_model
from rllaunch.backends.megatron.options import MegatronConfigs, megatron_configs
from rllaunch.backends.megatron.placement import Placement
from rllaunch.backends.megatron.regions import torch_optimizers
from rllaunch.backends.megatron.shape import ModelShape, read_shape
from rllaunch.backends.megatron.start import starting_weights
from rllaunch.errors import ConfigError
from rllaunch.resolve.schema import LaunchConfig

# Rank 0 sends an update piece by piece while the others wait for their turn.
_TIMEOUT = timedelta(minutes=15)
# Elements between the beginnings of two tensors divide by this: kernels read 16 bytes at a time.
_ALIGNMENT = 16
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Built:
    """This rank's part of what is trained.

    Args:
        ddp, placement: of the policy.
        critic: the critic's model as `ddp` is the policy's, where the algorithm has one.
        optimizer: of both.
    """

    shape: ModelShape
    configs: MegatronConfigs
    ddp: Any
    optimizer: Any
    placement: Placement
    adapters: Adapters | None
    critic: Any = None
    critic_placement: Placement | None = None

    @property
    def models(self) -> list[Any]:
        """All that is trained, the policy first."""
        return [self.ddp] if self.critic is None else [self.ddp, self.critic]


def start_processes(config: LaunchConfig, rank: RankInfo, device: str) -> None:
    """Megatron-core's groups over all ranks.

    Raises:
        ConfigError: the ranks do not divide by the layout.
    """
    trainer = config.trainer
    _check_world(config, rank.world_size)
    is_cuda = device.startswith("cuda")
    if is_cuda:
        torch.cuda.set_device(torch.device(device).index or 0)  # the first of those this process sees
    # One process needs no address, and is given none.
    alone = dist.HashStore() if rank.world_size == 1 else None  # type: ignore[attr-defined]
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
        init_method=f"tcp://{rank.master_addr}:{rank.master_port}" if alone is None else None,
        store=alone,
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=_TIMEOUT,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=trainer.tensor_model_parallel_size,
        pipeline_model_parallel_size=trainer.pipeline_model_parallel_size,
        context_parallel_size=trainer.context_parallel_size,
        expert_model_parallel_size=trainer.expert_model_parallel_size,
        expert_tensor_parallel_size=trainer.expert_tensor_parallel_size,
    )
    # Without dropout only the initialisation draws random numbers. Its trackers keep states of the GPU's generator;
    # this option makes one that keeps none.
    tensor_parallel.model_parallel_cuda_manual_seed(
        config.run.seed, inference_rng_tracker=not is_cuda, force_reset_rng=True
    )


def stop_processes() -> None:
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _check_world(config: LaunchConfig, world: int) -> None:
    trainer = config.trainer
    tp, pp, cp, ep = (
        trainer.tensor_model_parallel_size,
        trainer.pipeline_model_parallel_size,
        trainer.context_parallel_size,
        trainer.expert_model_parallel_size,
    )
    etp = trainer.expert_tensor_parallel_size or tp
    for name, size in (("TP × PP × CP", tp * pp * cp), ("ETP × EP × PP", etp * ep * pp)):
        if world % size:
            raise ConfigError(
                f"{world} trainer ranks do not divide by {name} = {size}",
                [
                    "trainer.tensor_model_parallel_size, pipeline_model_parallel_size, context_parallel_size, "
                    "expert_model_parallel_size"
                ],
                "choose sizes whose product divides the number of GPUs",
            )


def build(context: LaunchContext, device: str) -> Built:
    """Model, gradient buffers and optimizer with its moments, from the starting weights; resident on `device`."""
    config, on_cpu = context.config, not device.startswith("cuda")
    shape = read_shape(model_config(context).to_dict())
    configs = megatron_configs(config, shape, on_cpu=on_cpu)
    if dist.get_rank() == 0:
        for note in configs.notes:
            _log.warning(note)
    configs.transformer.finalize_model_grads_func = _sum_gradients
    tensor_of = starting_weights(context, shape)
    model, placement = _model(configs, shape, tensor_of, device)
    adapters = critic_placement = None
    if config.has_lora:
        adapters, placement = freeze_and_adapt(context, model, placement)
    _lay_together(_frozen(model))
    ddp, critic = DistributedDataParallel(configs.transformer, configs.ddp, model), None
    peak_lr = {ddp: config.trainer.lr}
    if config.has_critic:
        model, critic_placement = _model(configs, shape, tensor_of, device, is_critic=True)
        _lay_together(_frozen(model))
        critic = DistributedDataParallel(configs.transformer, configs.ddp, model)
        peak_lr[critic] = config.algorithm.critic_lr or config.trainer.lr
    optimizer = _optimizer(configs, peak_lr, on_cpu=on_cpu)
    return Built(shape, configs, ddp, optimizer, placement, adapters, critic, critic_placement)


def _model(
    configs: MegatronConfigs,
    shape: ModelShape,
    tensor_of: Callable[[str], Tensor],
    device: str,
    *,
    is_critic: bool = False,
) -> tuple[Any, Placement]:
    """A model with the starting weights, and where its parameters are."""
    # A critic's embedding is tied to nothing, and stages would exchange gradients for its copy.
    model = build_model(configs, replace(shape, is_tied=False) if is_critic else shape).to(device)
    # Not `model.to(dtype)`: biases of routers are buffers, and stay in float32.
    for parameter in model.parameters():
        if not getattr(parameter, "stays_float32", False):
            parameter.data = parameter.data.to(configs.transformer.params_dtype)
    placement = Placement(model, shape)
    placement.fill(tensor_of)
    if is_critic:
        put_value_head(model, device)
        placement = Placement(model, shape, critic_entries(shape))
    return model, placement


def _frozen(model: Any) -> list[Tensor]:
    """Parameters that nothing trains; Megatron-core lays together those it does."""
    return [p for p in model.parameters() if not p.requires_grad]


def _optimizer(configs: MegatronConfigs, peak_lr: dict[Any, float], *, on_cpu: bool) -> Any:
    """One for each model, chained: a step clips all their gradients by one norm.

    Args:
        peak_lr: model → its learning rate.
    """
    # 0 clips nothing here, and Megatron-core then gives no norm either.
    clipping = replace(configs.optimizer, clip_grad=configs.optimizer.clip_grad or math.inf)
    parts: list[Any] = []
    for model, lr in peak_lr.items():
        optimizer = get_megatron_optimizer(clipping, [model], use_gloo_process_groups=on_cpu)
        for group in optimizer.param_groups:
            group["max_lr"] = lr
        parts += getattr(optimizer, "chained_optimizers", [optimizer])
    chained = ChainedOptimizer(parts)
    make_state(chained, list(peak_lr))
    return chained


def _sum_gradients(model: list[Any], num_tokens: Any = None, **more: Any) -> None:
    """Add the gradients of all ranks: the loss is already divided by the tokens of all of them."""
    finalize_model_grads(model, None, **more)


def make_state(optimizer: Any, models: Sequence[Any]) -> None:
    """Adam's state, as a few large pieces of memory.

    The moments would otherwise come with the first step, and what is offloaded must be known before; each tensor in a
    piece of its own would cost a call of the driver at every onload.

    Args:
        models: whose parameters it steps, as Megatron-core wraps them.
    """
    # A float32 parameter is stepped where its model has it, and a buffer may hold just one: a critic's head. Moved
    # away, it would be stepped for nobody by a precision-aware optimizer, after which 0.16.1 copies nothing back.
    buffers = [b.param_data for model in models for b in (*model.buffers, *model.expert_parallel_buffers)]
    of_models = {b.untyped_storage().data_ptr() for b in buffers if b is not None}
    for one in torch_optimizers(optimizer):
        stepped = [p for group in one.param_groups for p in group["params"]]
        _lay_together([p for p in stepped if p.untyped_storage().data_ptr() not in of_models])
    _make_moments(optimizer)
    for one in torch_optimizers(optimizer):
        states = [one.state[p] for group in one.param_groups for p in group["params"]]
        for name in ("exp_avg", "exp_avg_sq"):
            _lay_together([state[name] for state in states if isinstance(state.get(name), Tensor)])


def _lay_together(tensors: Sequence[Tensor]) -> None:
    """Move tensors that have their memory for themselves into one piece for each type and device."""
    alone: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous():
            alone.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for (dtype, device), found in alone.items():
        flat = torch.zeros(sum(map(_padded_numel, found)), dtype=dtype, device=device)
        offset = 0
        for tensor in found:
            place = flat[offset : offset + tensor.numel()].view(tensor.shape)
            place.copy_(tensor.detach())
            tensor.data = place
            offset += _padded_numel(tensor)


def _padded_numel(tensor: Tensor) -> int:
    return -(-tensor.numel() // _ALIGNMENT) * _ALIGNMENT


def _make_moments(optimizer: Any) -> None:
    for wrapper in getattr(optimizer, "chained_optimizers", [optimizer]):
        hybrid = wrapper.optimizer if hasattr(wrapper.optimizer, "sub_optimizers") else None  # some of it on the host
        parts = hybrid.sub_optimizers if hybrid else [wrapper.optimizer]
        adams = [part for part in parts if isinstance(part, torch.optim.AdamW)]
        for adam in adams:
            for group in adam.param_groups:
                for parameter in group["params"]:
                    moments = {n: torch.zeros_like(parameter.data) for n in ("exp_avg", "exp_avg_sq")}
                    adam.state[parameter] = {"step": torch.tensor(0.0), **moments}
        if hybrid:
            hybrid._sync_sub_optimizers_state_to_hdo()
        elif not adams and wrapper.init_state_fn is not None:
            wrapper.init_state_fn(wrapper.optimizer, wrapper.config)


def set_num_steps(optimizer: Any, num_steps: int) -> None:
    """Tell Adam how many steps its moments are of."""
    for one in torch_optimizers(optimizer):
        counted = [state["step"] for state in one.state.values() if "step" in state]
        for step in counted:
            step.fill_(num_steps)
        for group in one.param_groups:
            # A fused Adam counts in its groups, from its first step on only.
            if "step" in group or (not counted and num_steps and group["params"]):
                group["step"] = num_steps
