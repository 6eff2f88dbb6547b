"""What `rllaunch plan` says of a launch on the embedded backend, from shapes alone, is what its buffers will be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import rig

from rllaunch.plan.architecture import read_architecture
from rllaunch.plan.embedded import NUM_SPECIAL, Prompts, embedded_sizes


@pytest.mark.parametrize("architecture", [rig.QWEN3, rig.LLAMA, rig.QWEN3_MOE], ids=lambda a: a["model_type"])
@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "kl", "lora"])
@pytest.mark.parametrize("bucket", [2048, 2**20])
def test_every_region_is_as_planned_to_the_byte(
    architecture: dict[str, Any], algorithm: str, bucket: int, tmp_path: Path
):
    options = rig.HandoffOptions(engine_weights="mirror")
    context = rig.make_context(algorithm, options, architecture=architecture)
    handoff = context.config.handoff.model_copy(update={"update_weight_buffer_size": bucket})
    config = context.config.model_copy(update={"handoff": handoff})
    whole = rig.Rig(rig.replace(context, config=config), tmp_path)
    counted = read_architecture(architecture | {"vocab_size": NUM_SPECIAL + len(rig.VOCABULARY)})
    planned = embedded_sizes(config, counted, Prompts(rig.VOCABULARY, rig.MAX_PROMPT_TOKENS))
    assert {r: planned.gpu[r] for r in whole.sizes} == dict(whole.sizes)
