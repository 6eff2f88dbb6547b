"""Names under `[megatron]` that are not simply fields of Megatron-core's dataclasses, and what becomes of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Names of Megatron-LM's command line that Megatron-core's dataclasses spell otherwise.
ALIASES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "fp8_format": ("fp8", lambda value: value),
    "accumulate_allreduce_grads_in_fp32": ("grad_reduce_in_fp32", lambda value: value),
    "grad_reduce_in_bf16": ("grad_reduce_in_fp32", lambda value: not value),
}

# Read by the trainer itself.
OWN = frozenset({"log_probs_chunk_size", "qkv_format"})

# Options of miles around Megatron (radixark/miles@31f1ca9 miles/utils/arguments.py), and what becomes of them here.
FOREIGN = {
    "use_rollout_routing_replay": "the router chooses experts anew in training",
    "use_fault_tolerance": "a rank that fails ends the run; --resume goes on",
    "allgather_cp": "local layers always gather keys and values; with Transformer Engine cp_comm_type says how",
    "freeze_e_score_correction_bias": "the bias is frozen unless moe_router_bias_update_rate is set",
    "moe_router_freeze_gate": "the router is trained",
    "use_dynamic_batch_size": "micro-batches hold as many samples as micro_batch_size or max_tokens_per_gpu says",
    "data_pad_size_multiplier": "a row is padded to what the ranks that share it need",
    "use_kl_loss": "algorithm.kl_loss_coef above 0 keeps the reference",
    "use_tis": "the ratio is already to the log-probabilities of the engine that sampled",
    "enable_mtp_training": "layers for multi-token prediction are not built",
    "megatron_to_hf_mode": "names and layouts are this trainer's own",
    "offload_train_target": "the backup is held in host memory",
    "rematerialize_param_from_master_weight": "parameters are backed up with the optimizer",
    "prefill_num_servers": "it is an option of the engines",
    "sglang_router_policy": "it is an option of the engines",
}

# Fields of the dataclasses that this trainer does not serve, and why.
UNSERVED = {
    "fp16": "there is no loss scaling; use --train-precision bf16",
    "calculate_per_token_loss": "losses are already divided by the tokens of all ranks",
    "moe_aux_loss_coeff": "the auxiliary loss would be weighed by tokens that the loss is already divided by",
    "moe_z_loss_coeff": "the auxiliary loss would be weighed by tokens that the loss is already divided by",
    "mtp_num_layers": "layers for multi-token prediction are not built",
    "virtual_pipeline_model_parallel_size": "a rank holds one stage",
    "overlap_grad_reduce": "gradients are reduced after the last micro-batch",
    "overlap_param_gather": "parameters are gathered inside the optimizer's step",
    "use_megatron_fsdp": "its buffers are not known to the handoff",
    "use_custom_fsdp": "its buffers are not known to the handoff",
    "average_in_collective": "gradients of the ranks are added",
    "hybrid_context_parallel": "every sample is shared by all context-parallel ranks",
    "cpu_offloading": "activations are not part of the handoff",
    "heterogeneous_block_specs": "all layers come from the architecture's facts",
}
