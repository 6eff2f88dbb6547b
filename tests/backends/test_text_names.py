"""A multi-modal checkpoint, as Qwen3.5's releases are: its language model is trained, and engines hold the rest too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rig import CollectedUpdate, make_context
from safetensors.torch import load_file, save_file

from rllaunch.backends.embedded.model import build_model, model_config
from rllaunch.backends.megatron.shape import ModelShape, read_shape
from rllaunch.backends.megatron.start import starting_weights
from rllaunch.backends.megatron.update import BucketSender
from rllaunch.backends.megatron.weights import entries, unstack_experts
from rllaunch.backends.sglang.checkpoint import checkpoint_tensors, of_layers
from rllaunch.backends.sglang.engine import of_updates, require_equal
from rllaunch.backends.sglang.update import Names
from rllaunch.backends.text_names import of_each_expert
from rllaunch.errors import ConfigError, RunError

TEXT = {
    "vocab_size": 52, "hidden_size": 32, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
}  # fmt: skip
TEXTS: dict[str, dict[str, Any]] = {
    "qwen3_5": {**TEXT, "intermediate_size": 48},
    "qwen3_5_moe": {
        **TEXT, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
    },
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
    "num_position_embeddings": 16,
}  # fmt: skip


@pytest.fixture(params=["qwen3_5", "qwen3_5_moe", "qwen3_5_moe, stacked"])
def release(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A directory with a tiny model of both kinds of tensors, and one of a layer that predicts further tokens."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    model_type, _, stacked = request.param.partition(", ")
    config = AutoConfig.for_model(model_type, text_config=TEXTS[model_type], vision_config=VISION)
    model: Any = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    if stacked:
        of_module = {n: t for n, t in model.state_dict().items() if ".mlp.experts." in n}
        tensors = {n: t for n, t in tensors.items() if ".mlp.experts." not in n} | of_module
    tensors["mtp.fc.weight"] = torch.zeros(2, 2)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def described(directory: Path) -> tuple[Any, ModelShape, dict[str, torch.Tensor]]:
    """A launch from the checkpoint, its shape, and what transformers reads of the language model."""
    context = make_context(model={"hf_checkpoint": str(directory)}, rollout={"backend": "sglang", "dtype": "float32"})
    shape = read_shape(model_config(context).to_dict())
    return context, shape, dict(unstack_experts(build_model(context).state_dict().items(), shape))


def test_training_starts_from_the_language_model(release: Path) -> None:
    context, shape, want = described(release)
    assert shape.model_type in ("qwen3_5_text", "qwen3_5_moe_text")
    tensor_of = starting_weights(context, shape)
    names = [source for entry in entries(shape) for source in entry.sources]
    assert set(names) == want.keys()
    assert all(torch.equal(tensor_of(name), want[name]) for name in names)


def test_an_update_brings_an_engine_all_that_is_no_vision_tower(release: Path, tmp_path: Path) -> None:
    _, shape, tensors = described(release)
    sizes = checkpoint_tensors(str(release))
    assert sizes is not None
    assert {"mtp.fc.weight"} == sizes.keys() - tensors.keys(), "of an engine that speculates"
    # What `--model` of the release's directory gives, whose layers are those of its text model.
    architecture = json.loads((release / "config.json").read_text(encoding="utf-8"))
    brought = of_layers({**sizes, f"model.layers.{shape.num_layers}.eh_proj.weight": 4}, architecture)
    assert brought == {name: tensor.nbytes for name, tensor in tensors.items()}
    names = Names("engine-0", brought)
    names.begin()

    class Engine(CollectedUpdate):
        def load_bucket(self, bucket: Any) -> None:
            names.take(bucket.tensors)

    sender = BucketSender(tmp_path / "bucket", 2000)
    sent = [(source, tensors[source]) for entry in entries(shape) for source in entry.sources]
    sender.send(sent, Engine())
    names.end(1, is_whole=True)
    sender.close()


def test_a_vision_tower_that_an_engine_discarded_is_no_difference() -> None:
    loaded = [{"model.norm.weight": "1", "visual.blocks.0.attn.proj.weight": "2"}]
    updated = [{"model.norm.weight": "1", "visual.blocks.0.attn.proj.weight": "3"}]
    require_equal("engine-0", of_updates(loaded), of_updates(updated))
    updated[0]["model.norm.weight"] = "4"
    with pytest.raises(RunError, match=r"1 tensors of the first update differ .*: model\.norm\.weight"):
        require_equal("engine-0", of_updates(loaded), of_updates(updated))


def test_a_checkpoint_without_a_tensor_of_the_language_model_is_refused(release: Path) -> None:
    context, shape, _ = described(release)
    tensors = load_file(release / "model.safetensors")
    del tensors["model.language_model.layers.0.linear_attn.A_log"]
    save_file(tensors, release / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 tensors of the model: model\.layers\.0\.linear_attn\.A_log"):
        starting_weights(context, shape)


@pytest.mark.parametrize("of_text", [None, False, True])
def test_a_tied_embedding_that_the_whole_model_states_is_that_of_its_text(of_text: bool | None, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = TEXTS["qwen3_5"] | ({} if of_text is None else {"tie_word_embeddings": of_text})
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=VISION, tie_word_embeddings=True)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors"), "transformers has one tensor of both"
    context = make_context(model={"hf_checkpoint": str(tmp_path)}, rollout={"backend": "sglang", "dtype": "float32"})
    shape = read_shape(model_config(context).to_dict())
    assert shape.is_tied
    starting_weights(context, shape)
    saved: Any = model_config(context).get_text_config(decoder=True)
    assert saved.tie_word_embeddings, "what is saved has no head of its own either"


def test_a_stack_of_experts_is_their_matrices_one_after_the_other() -> None:
    at = "model.layers.3.mlp.experts"
    assert list(of_each_expert(f"{at}.gate_up_proj", 2)) == [
        (f"{at}.0.gate_proj.weight", 0, 0, 2),
        (f"{at}.0.up_proj.weight", 0, 1, 2),
        (f"{at}.1.gate_proj.weight", 1, 0, 2),
        (f"{at}.1.up_proj.weight", 1, 1, 2),
    ]
    assert list(of_each_expert(f"{at}.down_proj", 1)) == [(f"{at}.0.down_proj.weight", 0, 0, 1)]
    assert list(of_each_expert(f"{at}.0.down_proj.weight", 4)) == []
