"""The buckets of a megatron trainer's update: whole, and with together what engines must be given together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rig import QWEN3_MOE, CollectedUpdate, make_context

from rllaunch.backends.base import Bucket, joined_with
from rllaunch.backends.embedded.model import build_model, model_config
from rllaunch.backends.megatron.shape import read_shape
from rllaunch.backends.megatron.update import BucketSender, bucket_bytes
from rllaunch.backends.megatron.weights import entries, unstack_experts
from rllaunch.backends.sglang.update import Names

# As in real models, nothing is larger than the embedding.
EXPERTS = {**QWEN3_MOE, "vocab_size": 64}
LATENT = {
    **EXPERTS, "model_type": "glm4_moe_lite", "num_key_value_heads": 2, "q_lora_rank": 12, "kv_lora_rank": 8,
    "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4, "head_dim": 4, "n_routed_experts": 4,
}  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "latents": LATENT,
    "no query latent": {**LATENT, "q_lora_rank": 0},
    "no latents": EXPERTS,
}


class CheckedUpdate(CollectedUpdate):
    """An engine's names held against each bucket, whose bytes are kept."""

    def __init__(self, names: Names) -> None:
        super().__init__()
        self.names, self.buckets = names, list[Bucket]()

    def load_bucket(self, bucket: Bucket) -> None:
        self.names.take(bucket.tensors)
        self.buckets.append(bucket)
        super().load_bucket(bucket)


@pytest.mark.parametrize("limit", [1, 700, 1500, 4000, 10**6])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_update_is_whole_in_buckets_of_any_size_and_parts_no_tensors_that_an_engine_joins(
    name: str, limit: int, tmp_path: Path
):
    context = make_context(
        architecture=ARCHITECTURES[name],
        rollout={"backend": "sglang", "dtype": "float32"},
        handoff={"update_weight_buffer_size": limit},
    )
    context = replace(context, vocabulary="")
    shape = read_shape(model_config(context).to_dict())
    tensors = dict(unstack_experts(build_model(context).state_dict().items(), shape))
    sent = [(source, tensors[source]) for entry in entries(shape) for source in entry.sources]
    names = Names("engine-0", tensors.keys())
    names.begin()
    sink = CheckedUpdate(names)
    sender = BucketSender(tmp_path / "update.bin", limit)
    nbytes = sender.send(sent, sink)
    sender.close()
    names.end(1, is_whole=True)
    assert sink.tensors.keys() == tensors.keys()
    assert all(torch.equal(sink.tensors[n], t) for n, t in tensors.items())
    assert nbytes == sum(bucket.nbytes for bucket in sink.buckets)
    assert max(bucket.nbytes for bucket in sink.buckets) <= bucket_bytes(context, shape)
    for bucket in sink.buckets:
        is_one_group = len(bucket.tensors) == 1 or joined_with(bucket.tensors[0].name) == bucket.tensors[-1].name
        assert bucket.nbytes <= limit or is_one_group
    assert (len(sink.buckets) == 1) == (limit == 10**6)
    assert any(map(joined_with, tensors)) == (name == "latents")
