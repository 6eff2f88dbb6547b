"""The language model of trainer and engine: a `transformers` causal LM, the same on every process of a run."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from rllaunch.algo.lora import apply_lora
from rllaunch.algo.value_head import ValueModel
from rllaunch.backends.base import LaunchContext
from rllaunch.backends.embedded.tokenizer import BOS_ID, EOS_ID, NUM_SPECIAL, PAD_ID, loading
from rllaunch.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def model_config(context: LaunchContext) -> PreTrainedConfig:
    """The architecture: of the checkpoint if there is one, else of `model.architecture`.

    A character vocabulary decides the vocabulary size and the special ids of a model without a checkpoint.

    Raises:
        ConfigError: the checkpoint cannot be had, or transformers does not know the architecture or refuses one of its
            values.
    """
    from transformers import AutoConfig

    model = context.config.model
    if model.hf_checkpoint:
        with loading("a model's config.json", model.hf_checkpoint):
            config = _told_of_linear_attention(AutoConfig.from_pretrained(model.hf_checkpoint))
        needed = NUM_SPECIAL + len(context.vocabulary)
        has: Any = config.get_text_config(decoder=True)  # a multi-modal one says it of its language model
        if context.vocabulary and has.vocab_size < needed:
            raise ConfigError(
                f"a character vocabulary of {needed} tokens is larger than the checkpoint's {has.vocab_size}",
                ["model.vocabulary", "model.hf_checkpoint"],
            )
        return config
    facts = deepcopy(model.architecture)  # transformers completes nested facts in place
    model_type = facts.pop("model_type", None)
    if model_type is None:
        raise ConfigError(
            "the model has neither a checkpoint nor an architecture with a model_type",
            ["model.hf_checkpoint is empty", "model.architecture.model_type is not set"],
            "choose a model profile (--model) or a checkpoint (--hf-checkpoint)",
        )
    # TOML knows no null: a profile's 0 is the checkpoint's null, queries without a latent.
    if facts.get("q_lora_rank") == 0:
        facts["q_lora_rank"] = None
    facts["initializer_range"] = context.config.trainer.init_method_std
    if context.vocabulary:
        facts |= {
            "vocab_size": NUM_SPECIAL + len(context.vocabulary),
            "pad_token_id": PAD_ID,
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
        }
    try:
        config = AutoConfig.for_model(model_type, **facts)
    except (ValueError, TypeError, KeyError) as err:
        raise ConfigError(f"transformers cannot make a {model_type!r} of model.architecture: {err}") from err
    return _told_to_engines(_told_of_linear_attention(config))


def _told_of_linear_attention(config: PreTrainedConfig) -> PreTrainedConfig:
    """With what SGLang reads of a `config.json` of Qwen3-Next or Qwen3.5 where transformers writes it otherwise.

    Without it SGLang finds no layers, or takes a theta of 10,000 (0.5.23 configs/qwen3_next.py, models/qwen3_next.py):
    also of a checkpoint that transformers or a trainer here has saved. Whether embedding and head are one, transformers
    asks of a multi-modal model as a whole; its text model alone, which is trained and saved, is to know it too.
    """
    text: Any = config.get_text_config(decoder=True)
    if text.model_type not in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        return config
    kinds, rope = list(text.layer_types), text.rope_parameters
    told = {"rope_theta": rope["rope_theta"], "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0)}
    if "full_attention" in kinds:
        every = kinds.index("full_attention") + 1
        is_regular = all((kind == "full_attention") == ((i + 1) % every == 0) for i, kind in enumerate(kinds))
        told |= {"full_attention_interval": every} if is_regular else {}
    if config.tie_word_embeddings:
        told["tie_word_embeddings"] = True
    for name, value in told.items():
        setattr(text, name, value)
    return config


def _told_to_engines(config: PreTrainedConfig) -> PreTrainedConfig:
    """With what SGLang reads of a MiniMax-M2's `config.json` and transformers' class takes for granted.

    Without it SGLang rotates whole heads, norms no queries and keys, and chooses experts without their bias
    (0.5.23 models/minimax_m2.py).
    """
    if config.model_type != "minimax_m2":
        return config
    facts: Any = config
    share = facts.rope_parameters.get("partial_rotary_factor", 1.0)
    told = {
        "use_qk_norm": True,
        "use_routing_bias": True,
        "scoring_func": "sigmoid",
        "rotary_dim": int(facts.head_dim * share),
    }
    for name, value in told.items():
        if not hasattr(config, name):
            setattr(config, name, value)
    return config


def stays_float32(name: str) -> bool:
    """Whether a checkpoint's tensor is float32 in an engine whatever its other weights are, and is sent as such.

    The rates of linear attention: SGLang (0.5.23 models/qwen3_5.py, qwen3_next.py) has them so.
    """
    return name.endswith(".A_log")


def quantisation_of(context: LaunchContext) -> Mapping[str, Any] | None:
    """`quantization_config` of the checkpoint, or of `model.architecture` without one; None: it is not quantised."""
    found: Mapping[str, Any] | None = model_config(context).to_dict().get("quantization_config")
    return found


def checkpoint_directory(checkpoint: str) -> Path:
    """Where the files of a checkpoint lie; those of the hub are downloaded, unless they have been.

    Raises:
        ConfigError: it can be had neither from the hub nor from its cache.
    """
    if Path(checkpoint).is_dir():
        return Path(checkpoint)
    from huggingface_hub import snapshot_download

    # gpt-oss's repositories have the weights a second time, under other names.
    wanted, unwanted = ["*.json", "*.safetensors"], ["original/*"]
    with loading("weights", checkpoint):
        return Path(snapshot_download(checkpoint, allow_patterns=wanted, ignore_patterns=unwanted))


def build_model(
    context: LaunchContext, *, dtype: torch.dtype | None = None, device: str = "cpu", with_lora: bool | None = None
) -> PreTrainedModel:
    """The causal LM in evaluation mode, with LoRA adapters if the config asks for them.

    Random values depend on `run.seed` and `trainer.init_method_std` alone. They are drawn in float32 and then
    rounded, so a bf16 engine starts from the rounded weights of its float32 trainer.

    Args:
        dtype: of the parameters; `model.dtype` where None.
        device: `meta` for shapes without memory, else `cpu`.
        with_lora: overrides the config; a critic or a reference has no adapters.
    """
    from transformers import AutoModelForCausalLM

    config = context.config
    dtype = dtype or torch_dtype(config.model.dtype)
    checkpoint = config.model.hf_checkpoint
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.run.seed)
        if checkpoint and device != "meta":
            with loading("weights", checkpoint):
                model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        else:
            with torch.device(device):
                model = AutoModelForCausalLM.from_config(model_config(context), dtype=torch.float32)
    # Not `model.to(dtype)`: that would round the rotary frequencies too, which are buffers.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    if with_lora if with_lora is not None else config.has_lora:
        algorithm = config.algorithm
        targets = algorithm.lora_target_modules
        try:
            apply_lora(model, algorithm.lora_rank, algorithm.lora_alpha, targets, seed=config.run.seed)
        except ValueError as err:
            raise ConfigError(str(err), f"algorithm.lora_target_modules = {list(targets)}") from err
    return cast("PreTrainedModel", model.eval())


def build_critic(context: LaunchContext, *, device: str = "cpu") -> ValueModel:
    """A value model on a backbone of its own, which starts as the policy's."""
    backbone = build_model(context, device=device, with_lora=False).base_model
    return ValueModel(backbone, hidden_size(backbone)).eval()


def hidden_size(model: nn.Module) -> int:
    size: int = text_config(model).hidden_size
    return size


def text_config(model: nn.Module) -> PreTrainedConfig:
    return cast("Any", model).config.get_text_config(decoder=True)


def engine_dtype(context: LaunchContext) -> torch.dtype:
    """
    Raises:
        ConfigError: `rollout.dtype` is one the embedded engine cannot compute in.
    """
    name = context.config.rollout.dtype
    if name not in ("float32", "bfloat16"):
        raise ConfigError(
            f"the embedded engine cannot hold weights as {name}",
            f"rollout.dtype = {name}",
            "set rollout.dtype to float32 or bfloat16",
        )
    return torch_dtype(name)


def torch_dtype(name: str) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def special_ids(model: nn.Module) -> tuple[int, frozenset[int]]:
    """The id that pads and the ids that end a response.

    A model that names no end token ends at the length limit only.
    """
    sources = [getattr(model, "generation_config", None), text_config(model)]
    eos = _first(sources, "eos_token_id")
    eos_ids = frozenset({eos} if isinstance(eos, int) else eos or ())
    pad = _first(sources, "pad_token_id")
    return (min(eos_ids, default=0) if pad is None else int(pad)), eos_ids


def _first(sources: list[Any], name: str) -> Any:
    return next((value for s in sources if (value := getattr(s, name, None)) is not None), None)
