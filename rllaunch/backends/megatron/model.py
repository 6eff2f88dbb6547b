"""The model as Megatron-core builds it, from its configs and shape."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from torch import Tensor

from rllaunch.backends.megatron.biased_experts import add_biases_once
from rllaunch.backends.megatron.delta_net import put_delta_nets
from rllaunch.backends.megatron.gates import gate_attention, gate_shared_experts
from rllaunch.backends.megatron.head_norms import norm_all_heads
from rllaunch.backends.megatron.local_layers import use_torch
from rllaunch.backends.megatron.options import MegatronConfigs
from rllaunch.backends.megatron.shape import ModelShape
from rllaunch.backends.megatron.streams import StreamsModel, put_streams

# Norms of latents have the class default of transformers (DeepSeek-V3, GLM-4.7-Flash), whatever `rms_norm_eps` says.
_LATENT_NORM_EPS = 1e-6


def build_model(configs: MegatronConfigs, shape: ModelShape) -> Any:
    """This rank's stage of the model; parallel groups must be initialised.

    Its logits are [B, T, padded vocabulary / TP]: each rank has its part of the vocabulary.
    """
    config = configs.transformer
    if not configs.uses_te:
        _mend_imports()
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=configs.uses_te, normalization="RMSNorm")
    if not configs.uses_te:
        use_torch(spec)
    if shape.qk_norm == "all":
        norm_all_heads(spec)
    if shape.has_output_gate:
        gate_attention(spec)
    if shape.delta_net:
        put_delta_nets(spec, shape, config)
    if shape.streams:
        put_streams(spec, shape, config)
    model = (StreamsModel if shape.streams else GPTModel)(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=shape.padded_vocab_size(config.tensor_model_parallel_size),
        max_sequence_length=shape.max_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=shape.is_tied,
        position_embedding_type=_position_embedding(shape),
        rotary_percent=shape.rope.share,
        rotary_base=shape.rope.theta,
        rope_scaling=shape.rope.kind == "llama3",
        rope_scaling_factor=shape.rope.factor,
    )
    if shape.experts and shape.experts.has_shared_gate:
        gate_shared_experts(model)
    if shape.streams:
        model.start_streams(shape.streams.number)
    if shape.latent:
        _set_latent_norms(model)
    if shape.linear_bias:
        add_biases_once(model)
    if shape.pad_id is not None and model.pre_process:
        _keep_embedding_of(shape.pad_id, model.embedding.word_embeddings)
    return model


def _position_embedding(shape: ModelShape) -> str:
    """Of those that the model hands to its layers; some rotate by themselves."""
    if shape.compressed:
        return "none"
    return "yarn" if shape.rope.kind == "yarn" and not shape.latent else "rope"


def _keep_embedding_of(pad_id: int, embedding: Any) -> None:
    """Let no gradient reach the embedding of one token.

    Freshly initialised it is zero, and a policy can sample it: through the norm behind it, its gradient would be
    a thousand times that of all others, and clipping would leave nothing of these.
    """

    def hook(module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        is_pad = args[0] == pad_id  # [B, T], as is the output, unless that is this rank's part of [T, B]
        if module.reduce_scatter_embeddings:
            ranks = parallel_state.get_tensor_model_parallel_world_size()
            is_pad = is_pad.t().chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
        return torch.where(is_pad[..., None], output.detach(), output)

    embedding.register_forward_hook(hook)


def _set_latent_norms(model: Any) -> None:
    for layer in model.decoder.layers:
        attention = layer.self_attention
        for name in ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"):
            module: Any = getattr(attention, name, None)
            if hasattr(module, "eps"):
                module.eps = _LATENT_NORM_EPS


def _mend_imports() -> None:
    """Let mixtures of experts and latent attention run without Transformer Engine.

    Megatron-core 0.16.1 takes its own `extensions.transformer_engine`, which can always be imported, for a sign that
    Transformer Engine is there: `moe_utils` then lacks a name it asks for, and `multi_latent_attention` asks whether a
    module is an instance of a mock. 0.19.2 knows better, and then has no name either for the linear layer
    that needs none of it.

    Where it is installed and local layers are asked for, it would compute routers all the same, and be given gpt-oss's
    narrow biases with wide results, which nobody has seen its kernel take.
    """
    moe_utils.te_general_gemm = None
    if not isinstance(getattr(multi_latent_attention, "TELinear", ()), type | tuple):
        multi_latent_attention.TELinear = ()
    if multi_latent_attention.Linear is None:
        multi_latent_attention.Linear = Linear
