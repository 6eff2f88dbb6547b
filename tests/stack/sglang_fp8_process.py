"""SGLang's model in this process, told of its weights as an engine is, given an update in buckets as its ranks are.

Writes what its parameters then hold. SGLang's kernels for FP8, and for attention with sinks, want a GPU (or AMX ones
that have no wheel): nothing is computed with them here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def sglang_model(directory: str, arguments: dict[str, Any]) -> Any:
    """Parameters as SGLang makes them, with its stand-ins in them."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import loader
    from sglang.srt.model_loader.weight_utils import initialize_dummy_weights
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    options = {"attention_backend": "torch_native", **arguments}
    server = ServerArgs(model_path=directory, device="cpu", skip_tokenizer_init=True, **options)
    publish(server, role="scheduler", ranks=SpawnRanks(world_rank=0))
    start_groups(server)
    config, how = ModelConfig.from_server_args(server), LoadConfig()
    with loader.set_default_torch_dtype(torch.bfloat16):
        model = loader._initialize_model(config, how, loader._get_quantization_config(config, how))
    initialize_dummy_weights(model)
    return model


def start_groups(server: Any) -> None:
    from sglang.srt import distributed
    from sglang.srt.layers.dp_attention import initialize_dp_attention

    store = Path(sys.argv[1]) / "rendezvous"
    distributed.init_distributed_environment(
        world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{store}", backend="gloo"
    )
    distributed.initialize_model_parallel()
    initialize_dp_attention(server)


def main() -> None:
    work, arguments = Path(sys.argv[1]), json.loads(sys.argv[2])
    model = sglang_model(str(work / "bf16"), arguments)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    loaded = {}
    for kind in ("buckets", "checkpoint"):
        for name, parameter in model.named_parameters():
            parameter.data.copy_(before[name])
        for file in sorted((work / kind).glob("*.safetensors")):
            model.load_weights(iter(load_file(file).items()))
        loaded[kind] = {n: p.detach().clone() for n, p in model.named_parameters()}
    torch.save((before, loaded["buckets"], loaded["checkpoint"]), work / "parameters.pt")


if __name__ == "__main__":
    main()
