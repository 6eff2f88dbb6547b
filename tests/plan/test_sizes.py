"""Bytes of a launch's regions against arithmetic from the models' published widths, written out here."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest
from architecture_facts import MODELS
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from launches import config_of, resolved, sizes, sizes_from

from rllaunch.errors import ConfigError
from rllaunch.plan import constants as c
from rllaunch.plan.architecture import Architecture, read_architecture
from rllaunch.plan.choose import architecture_of
from rllaunch.plan.sizes import LaunchSizes, sizes_of, stage_layers

GIB = 2**30
# What every launch here runs on: one node of 8 H100.
H100 = "--hardware H100 --num-nodes 1"

# Qwen3-0.6B: hidden 1024, FFN 3072, 28 layers, 16 query and 8 KV heads of 128, tied embedding of 151936 rows.
SMALL_MATRICES = 2048 * 1024 + 2 * 1024 * 1024 + 1024 * 2048 + 3 * 3072 * 1024
SMALL_NORMS = 2 * 1024 + 2 * 128
SMALL = f"--model qwen3-0.6b {H100}"

# Qwen3-30B-A3B: hidden 2048, 48 layers, 32 query and 4 KV heads of 128, 128 experts of 768, untied.
MOE_MATRICES = 4096 * 2048 + 2 * 512 * 2048 + 2048 * 4096
MOE_COPIED = 2 * 2048 + 2 * 128 + 128 * 2048  # norms and router
MOE_EXPERT = 3 * 768 * 2048
MOE = f"--model qwen3-30b-a3b {H100} --tensor-model-parallel-size 4 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1"

# DeepSeek-V3: hidden 7168, 128 heads of 128 + 64, latents 1536 and 512, 3 dense layers of 18432, then 58 of 256 experts
# of 2048 and a shared one.
LATENT_CUT = 128 * 192 * 1536 + 128 * 256 * 512 + 7168 * 128 * 128  # q_b, kv_b, o
LATENT_WHOLE = 1536 * 7168 + (512 + 64) * 7168  # q_a, kv_a
V3_NORMS = 2 * 7168 + 1536 + 512
V3_DENSE = 3 * 18432 * 7168
V3_EXPERT = 3 * 2048 * 7168


# -- trainer ---------------------------------------------------------------------------------------


def test_a_dense_model_on_one_gpu_is_held_whole_with_sixteen_bytes_of_state_and_gradients_a_parameter():
    made = sizes("--model qwen3-0.6b --hardware H100 --num-nodes 1 --num-gpus-per-node 1")
    # 151936 rows divide by 128: nothing is padded.
    count = 28 * (SMALL_MATRICES + SMALL_NORMS) + 151936 * 1024 + 1024
    assert count == made.parameters == 596_049_920
    assert (made.gpu["params"], made.gpu["grads"], made.gpu["optimizer"]) == (2 * count, 4 * count, 12 * count)
    assert (made.node["params"], made.node["optimizer"]) == (2 * count, 12 * count)


def test_tensor_and_pipeline_parallel_ranks_hold_their_share_and_the_tied_embedding_is_at_both_ends():
    made = sizes(f"{SMALL} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2")
    rows = 152064 // 2  # 151936 padded to a multiple of 2 × 128, over two ranks
    first = 14 * (SMALL_MATRICES // 2 + SMALL_NORMS) + rows * 1024
    last = first + 1024
    assert [stage.layers for stage in made.stages] == [range(14), range(14, 28)]
    assert [stage.parameters for stage in made.stages] == [first, last]
    # 8 GPUs ÷ (2 × 2): two data-parallel ranks share the optimizer's state.
    assert [stage.shard for stage in made.stages] == [ceil(first / 2), ceil(last / 2)]
    assert made.node["params"] == 4 * 2 * first + 4 * 2 * last
    assert made.node["optimizer"] == 4 * 12 * ceil(first / 2) + 4 * 12 * ceil(last / 2)


@pytest.mark.parametrize(
    ("tp", "rows"), [(1, 151936), (2, 152064), (4, 152064), (8, 152576)], ids=["TP1", "TP2", "TP4", "TP8"]
)
def test_the_vocabulary_is_padded_to_128_times_tp(tp: int, rows: int):
    made = sizes(f"{SMALL} --tensor-model-parallel-size {tp}")
    held = 28 * (SMALL_MATRICES // tp + SMALL_NORMS) + rows // tp * 1024 + 1024
    assert made.stages[0].parameters == held


def test_experts_are_spread_by_ep_and_their_state_over_expert_data_parallel_ranks_only():
    made = sizes(MOE)
    rows = 152064 // 4  # 151936 padded to a multiple of 4 × 128
    dense = 48 * (MOE_MATRICES // 4 + MOE_COPIED) + 2 * rows * 2048 + 2048
    experts = 48 * 128 // 8 * MOE_EXPERT
    assert made.stages[0].parameters == dense + experts
    assert made.parameters == 48 * (MOE_MATRICES + MOE_COPIED + 128 * MOE_EXPERT) + 2 * 151936 * 2048 + 2048
    # TP 4: two data-parallel ranks share the dense state. EP 8 takes all GPUs: nobody shares an expert's.
    assert made.stages[0].shard == ceil(dense / 2) + experts
    assert made.gpu["params"] == 2 * (dense + experts)
    assert made.gpu["grads"] == 4 * (dense + experts)
    assert made.gpu["optimizer"] == 12 * (ceil(dense / 2) + experts)


def test_two_nodes_give_each_expert_two_owners_and_each_dense_parameter_four():
    made = sizes(MOE.replace("--num-nodes 1", "--num-nodes 2"))
    dense = 48 * (MOE_MATRICES // 4 + MOE_COPIED) + 2 * 152064 // 4 * 2048 + 2048
    experts = 48 * 128 // 8 * MOE_EXPERT
    assert made.stages[0].shard == ceil(dense / 4) + experts // 2


def test_expert_tensor_parallel_ranks_cut_each_expert_and_follow_tp_unless_set():
    four = sizes(MOE.replace("--expert-model-parallel-size 8", "--expert-model-parallel-size 2").rsplit("--", 1)[0])
    dense = 48 * (MOE_MATRICES // 4 + MOE_COPIED) + 2 * 152064 // 4 * 2048 + 2048
    assert four.stages[0].parameters == dense + 48 * 128 // 2 * MOE_EXPERT // 4


def test_context_parallel_ranks_hold_all_parameters_and_share_the_state():
    long = f"{SMALL} --rollout-max-context-len 16384"
    plain, split = sizes(long), sizes(f"{long} --context-parallel-size 4")
    assert split.stages[0].parameters == plain.stages[0].parameters
    assert split.stages[0].shard == plain.stages[0].shard == ceil(596_049_920 / 8)
    assert split.gpu["activations"] < plain.gpu["activations"]


def test_without_a_distributed_optimizer_every_rank_has_the_whole_state():
    made = sizes(f"{SMALL} --megatron-use-distributed-optimizer false")
    assert made.gpu["optimizer"] == 12 * 596_049_920


def test_a_precision_aware_optimizer_keeps_half_masters_and_small_moments():
    made = sizes(
        f"{SMALL} --megatron-use-precision-aware-optimizer --megatron-exp-avg-dtype bf16 --megatron-exp-avg-sq-dtype fp8"
    )
    assert made.gpu["optimizer"] == (2 + 2 + 1) * ceil(596_049_920 / 8)
    assert sizes(f"{SMALL} --megatron-grad-reduce-in-bf16").gpu["grads"] == 2 * 596_049_920
    assert sizes(f"{SMALL} --megatron-rematerialize-param-from-master-weight").node["params"] == 0


def test_float32_parameters_are_their_own_masters():
    made = sizes(f"{SMALL} --model-dtype float32 --train-precision fp32")
    assert made.gpu["params"] == 4 * 596_049_920
    assert made.gpu["optimizer"] == 8 * ceil(596_049_920 / 8)


def test_stages_of_other_lengths_are_at_the_ends_and_the_fullest_decides():
    made = sizes(
        f"{SMALL} --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 6"
    )
    assert [len(stage.layers) for stage in made.stages] == [2, 10, 10, 6]
    layer = SMALL_MATRICES + SMALL_NORMS
    held = [2 * layer + 151936 * 1024, 10 * layer, 10 * layer, 6 * layer + 151936 * 1024 + 1024]
    assert [stage.parameters for stage in made.stages] == held
    assert held[3] == max(held)
    assert made.gpu["params"] == 2 * held[3]
    # Two ranks a stage, all on one node.
    assert made.node["params"] == 2 * 2 * sum(held)


def test_the_recipe_of_deepseek_v4_has_four_layers_in_front_six_in_between_and_three_at_the_end():
    launch = resolved("--model dsv4 --hardware GB300")
    assert [len(layers) for layers in stage_layers(launch.config, 43)] == [4, 6, 6, 6, 6, 6, 6, 3]
    made = sizes_of(launch.config, architecture_of(launch))
    fullest = max(sum(stage.regions.values()) for stage in made.stages)
    assert sum(made.gpu[r] for r in ("params", "optimizer", "grads", "activations")) == fullest
    # Four ranks of a stage on a node (TP 2 × CP 2 a stage): the fullest node is one stage.
    assert made.node["params"] == 4 * max(stage.regions["params"] for stage in made.stages)


def test_a_rest_that_does_not_divide_makes_the_first_of_the_middle_stages_longer():
    launch = config_of(MODELS["qwen3-0.6b"].facts, 3, pipeline_model_parallel_size=3)
    assert [len(layers) for layers in stage_layers(launch, 28)] == [10, 9, 9]


def test_stages_that_cannot_hold_the_layers_are_an_error_with_both_numbers():
    launch = config_of(
        MODELS["qwen3-0.6b"].facts,
        2,
        pipeline_model_parallel_size=2,
        decoder_first_pipeline_num_layers=4,
        decoder_last_pipeline_num_layers=3,
    )
    with pytest.raises(
        ConfigError, match="2 pipeline stages with 4 in the first and 3 in the last do not hold 28 layers"
    ):
        stage_layers(launch, 28)


def test_adapters_alone_have_gradients_and_state_and_are_merged_into_what_an_update_sends():
    made = sizes(f"{SMALL} --tensor-model-parallel-size 2 --lora-rank 16")
    base = 28 * (SMALL_MATRICES // 2 + SMALL_NORMS) + 152064 // 2 * 1024 + 1024
    # B of a column-cut matrix is cut with its outputs, A of a row-cut one with its inputs.
    column = 16 * (2048 // 2 + 1024) + 2 * 16 * (1024 // 2 + 1024) + 2 * 16 * (3072 // 2 + 1024)
    row = 16 * (1024 + 2048 // 2) + 16 * (1024 + 3072 // 2)
    adapters = 28 * (column + row)
    # In float32 beside bf16 weights, so that they are their own masters.
    assert made.gpu["params"] == 2 * base + 4 * adapters
    assert made.gpu["grads"] == 4 * adapters
    assert made.gpu["optimizer"] == 8 * ceil(adapters / 4)
    assert made.update_bytes == sizes(f"{SMALL} --tensor-model-parallel-size 2").update_bytes


def test_experts_have_no_adapters():
    made = sizes(f"{MOE} --lora-rank 8")
    attention = 8 * (4096 // 4 + 2048) + 2 * 8 * (512 // 4 + 2048) + 8 * (2048 + 4096 // 4)
    assert made.gpu["grads"] == 4 * 48 * attention


def test_projections_to_latents_have_whole_adapters_on_every_rank():
    made = sizes("--model deepseek-v3 --hardware GB300 --num-nodes 32 --lora-rank 8 --lora-target-modules q_a_proj --set "
                 "trainer.tensor_model_parallel_size=8 --set trainer.pipeline_model_parallel_size=1")  # fmt: skip
    assert made.gpu["grads"] == 4 * 61 * 8 * (1536 + 7168)


def test_a_critic_is_a_second_model_with_a_state_of_its_own_and_one_row_for_a_head():
    one, two = sizes(SMALL), sizes(f"{SMALL} --advantage-estimator ppo")
    # The head is tied: what the policy has without it is what a value model has, and a row of the hidden size.
    count = one.stages[0].parameters
    assert two.stages[0].parameters == 2 * count + 1024
    assert two.gpu["params"] == 2 * (2 * count + 1024)
    assert two.gpu["grads"] == 4 * (2 * count + 1024)
    assert two.gpu["optimizer"] == 12 * (ceil(count / 8) + ceil((count + 1024) / 8))
    assert two.stages[0].actor_bytes == one.gpu["params"]


def test_a_critic_has_no_copy_of_the_vocabulary_at_its_end():
    made = sizes(f"{SMALL} --advantage-estimator ppo --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2")
    rows = 152064 // 2
    first = 14 * (SMALL_MATRICES // 2 + SMALL_NORMS) + rows * 1024
    last = first + 1024
    assert [stage.parameters for stage in made.stages] == [2 * first, last + (last - rows * 1024 + 1024)]


def test_an_optimizer_on_the_host_takes_pinned_tensors_up_to_a_power_of_two():
    made = sizes(f"{MOE} --optimizer-cpu-offload")
    dense = 48 * (MOE_MATRICES // 4 + MOE_COPIED) + 2 * 152064 // 4 * 2048 + 2048
    shard = ceil(dense / 2) + 48 * 128 // 8 * MOE_EXPERT
    # In float32 on a rank: gate and up of an expert are 12 MiB and take 16, down takes 8 for 6; q and o (TP 4) are 8 MiB,
    # k and v 1 MiB, the router 1 MiB and the norms are powers of two already.
    asked = 128 * (12 + 6) + 2 * 8 + 3 * 1
    taken = 128 * (16 + 8) + 2 * 8 + 3 * 1
    norms = (2 * 2048 + 2 * 128) * 4 / 2**20
    rounding = (taken + norms) / (asked + norms)
    parameters = 8 * shard
    assert made.gpu["optimizer"] == made.node["optimizer"] == 0
    assert made.static_host["optimizer_on_host"] == pytest.approx(parameters * (4 * rounding + 8), rel=1e-9)
    assert made.static_host["gradients_on_host"] == pytest.approx(parameters * 4 * rounding, rel=1e-9)
    assert made.host_optimizer == parameters
    half = sizes(f"{MOE} --optimizer-cpu-offload --megatron-optimizer-offload-fraction 0.5")
    assert half.gpu["optimizer"] == 6 * shard
    assert half.host_optimizer == parameters // 2
    loose = sizes(f"{MOE} --optimizer-cpu-offload --megatron-pin-cpu-params false --megatron-pin-cpu-grads false")
    assert loose.static_host["optimizer_on_host"] == 12 * parameters
    assert loose.static_host["gradients_on_host"] == 4 * parameters


# -- activations -----------------------------------------------------------------------------------

# A token of a layer of Qwen3-0.6B, in bf16: two residual streams and two norms, and what each matrix puts out.
SMALL_TOKEN = 2 * (4 * 1024 + 2048 + 2 * 1024 + 2 * 3072 + 2 * 1024)


@pytest.mark.parametrize(("response", "tokens"), [(1024, 2048), (32768, 32768)], ids=["budget", "one long sample"])
def test_logits_are_those_of_the_budget_or_of_one_longer_sample(response: int, tokens: int):
    made = sizes(
        f"{SMALL} --recompute-granularity full --max-tokens-per-gpu 2048 --rollout-max-response-len {response}"
    )
    kept = 2 * 1024 * 28 + SMALL_TOKEN  # the input of each layer, and one layer whole
    assert made.gpu["activations"] == tokens * kept + tokens * 151936 * 4 * int(c.LOGITS_COPIES.value)


def test_only_the_last_stage_has_logits_and_earlier_stages_hold_more_micro_batches():
    made = sizes(f"{SMALL} --pipeline-model-parallel-size 2 --max-tokens-per-gpu 2048")
    first, last = (stage.regions["activations"] for stage in made.stages)
    assert first == 2 * 2048 * 14 * SMALL_TOKEN
    assert last == 2048 * 14 * SMALL_TOKEN + 2048 * 151936 * 4 * int(c.LOGITS_COPIES.value)


def test_sequence_parallel_cuts_what_tensor_parallel_leaves_whole():
    words = f"{SMALL} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --max-tokens-per-gpu 2048"
    whole, cut = sizes(words), sizes(f"{words} --sequence-parallel")
    tp_token = 2 * (4 * 1024 + (2048 + 2 * 1024 + 2 * 3072) // 2 + 2 * 1024)
    assert whole.stages[0].regions["activations"] == 2 * 2048 * 14 * tp_token
    assert cut.stages[0].regions["activations"] == 2 * 2048 * 14 * SMALL_TOKEN // 2


def test_a_micro_batch_by_samples_is_as_long_as_they_can_get_and_context_parallel_cuts_it():
    words = f"{SMALL} --recompute-granularity full --micro-batch-size 2 --rollout-max-context-len 6000 --context-parallel-size 2"
    # The rank's queries read 2.5 times its own keys and values; of the one layer that is computed again they are there.
    gathered = 2 * 3 * 1024
    kept = 2 * 1024 * 28 + SMALL_TOKEN + gathered + 151936 * 4 * int(c.LOGITS_COPIES.value)
    assert sizes(words).gpu["activations"] == 6000 * kept


def test_training_in_fp8_keeps_quantised_weights_beside_the_activations():
    words = f"{SMALL} --recompute-granularity full --max-tokens-per-gpu 2048"
    more = sizes(f"{words} --train-precision fp8").gpu["activations"] - sizes(words).gpu["activations"]
    assert more == 28 * SMALL_MATRICES * int(c.FP8_WEIGHT_COPY_BYTES.value)


# -- engine ----------------------------------------------------------------------------------------


def test_an_engine_holds_its_share_in_bf16_and_fewer_kv_heads_than_ranks_are_copied():
    made = sizes(f"--model qwen3-30b-a3b {H100} --rollout-num-gpus-per-engine 8")
    attention = 2 * 4096 * 2048 // 8 + 2 * 512 * 2048 // 4  # 4 KV heads on 8 ranks: each on two
    layer = attention + MOE_COPIED + 128 * MOE_EXPERT // 8
    assert made.gpu["weights"] == 2 * (48 * layer + 2 * 151936 * 2048 // 8 + 2048)
    assert made.node["weights"] == 8 * made.gpu["weights"]
    assert made.update_bytes == 2 * made.parameters, "each rank is sent all of it and keeps its part"


def test_deepseek_v3_in_fp8_has_a_scale_for_every_block_and_leaves_router_norms_and_vocabulary_in_bf16():
    made = sizes("--model deepseek-v3 --hardware H200 --num-nodes 2 --rollout-num-gpus-per-engine 16")
    quantised = 61 * LATENT_CUT // 16 + 61 * LATENT_WHOLE + 3 * V3_DENSE // 16 + 58 * 257 * V3_EXPERT // 16
    plain = 61 * V3_NORMS + 58 * 256 * 7168 + 2 * 129280 * 7168 // 16 + 7168
    # One float32 for 128 × 128 elements.
    assert made.gpu["weights"] == pytest.approx(quantised * (1 + 4 / 128**2) + 2 * plain, abs=1000)


def test_data_parallel_attention_holds_attention_and_vocabulary_whole_and_cuts_the_rest():
    made = sizes(
        "--model deepseek-v3 --hardware H200 --num-nodes 2 --rollout-num-gpus-per-engine 16 --rollout-dtype bfloat16"
        " --sglang-enable-dp-attention --sglang-dp-size 16"
    )
    whole = 61 * (LATENT_CUT + LATENT_WHOLE + V3_NORMS) + 58 * 256 * 7168 + 2 * 129280 * 7168 + 7168
    cut = 3 * V3_DENSE + 58 * 257 * V3_EXPERT
    assert made.gpu["weights"] == 2 * (whole + cut // 16)


def test_fp4_halves_a_byte_for_experts_and_adds_one_for_each_32_of_them():
    bf16 = sizes(f"--model gpt-oss-20b {H100} --rollout-num-gpus-per-engine 1 --rollout-dtype bfloat16").gpu["weights"]
    fp4 = sizes(f"--model gpt-oss-20b {H100} --rollout-num-gpus-per-engine 1 --rollout-dtype fp4").gpu["weights"]
    matrices = 24 * 32 * 3 * 2880 * 2880  # 24 layers of 32 experts, gate, up and down
    assert bf16 - fp4 == 2 * matrices - (matrices // 2 + matrices // 32)


def test_the_kv_pool_is_what_mem_fraction_static_leaves_beside_the_weights():
    made = sizes(f"{SMALL} --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.6")
    usable = 85_520_809_984 - c.ENGINE_RESIDUAL.value - c.TRAINER_RESIDUAL.value
    assert made.gpu["kv_cache"] == int(0.6 * usable) - made.gpu["weights"]
    token = 28 * 2 * 4 * 128 * 2  # K and V of 4 of the 8 heads in bf16
    assert made.tokens_in_kv == made.gpu["kv_cache"] // token
    halved = sizes(
        f"{SMALL} --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.6 --sglang-kv-cache-dtype fp8_e4m3"
    )
    assert halved.tokens_in_kv == made.gpu["kv_cache"] // (token // 2)
    limited = sizes(f"{SMALL} --rollout-num-gpus-per-engine 2 --sglang-max-total-tokens 1000")
    assert (limited.gpu["kv_cache"], limited.tokens_in_kv) == (1000 * token, 1000)


def test_a_latent_is_on_every_rank_and_data_parallel_attention_does_not_change_that():
    for more in ("", " --sglang-enable-dp-attention --sglang-dp-size 16"):
        made = sizes(f"--model deepseek-v3 --hardware H200 --num-nodes 2 --rollout-num-gpus-per-engine 16{more}")
        assert made.tokens_in_kv == made.gpu["kv_cache"] // (61 * (512 + 64) * 2)


# -- over all layouts ------------------------------------------------------------------------------

POWERS = st.sampled_from([1, 2, 4, 8])


def layout_sizes(name: str, gpus: int, tp: int, pp: int, ep: int, etp: int) -> LaunchSizes:
    return sizes_from(
        MODELS[name].facts,
        gpus,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )


def divides(architecture: Architecture, tp: int, ep: int, etp: int) -> bool:
    """Every matrix divides, as Megatron asks for."""
    weights = [w for layer in {id(each): each for each in architecture.layers}.values() for w in layer.weights]
    cut = [(w.numel // w.copies, etp if w.is_expert else tp) for w in weights if w.split in ("column", "row")]
    return all(n % by == 0 for n, by in cut) and (architecture.num_experts or ep) % ep == 0


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(MODELS)), POWERS, POWERS, POWERS, POWERS)
def test_the_ranks_of_any_layout_hold_the_model_once(name: str, tp: int, pp: int, ep: int, etp: int):
    architecture = read_architecture(MODELS[name].facts)
    assume(divides(architecture, tp, ep, etp) and (architecture.num_experts or ep == etp == 1))
    made = layout_sizes(name, 4096, tp, pp, ep, etp)
    assert [i for stage in made.stages for i in stage.layers] == list(range(len(architecture.layers)))
    experts = sum(layer.num_expert_parameters for layer in architecture.layers)
    # What of experts no rank of ETP cuts, such as the bias of a row-cut matrix.
    loose = sum(w.numel for layer in architecture.layers for w in layer.weights if w.is_expert and w.split == "none")
    held_experts = (experts - loose) // (ep * etp) + loose // ep
    dense = sum(stage.parameters for stage in made.stages) - held_experts
    outside = [*architecture.embedding, *architecture.head]
    whole = [w for layer in architecture.layers for w in layer.weights if w.split == "none" and not w.is_expert]
    copied = sum(w.numel for w in (*whole, *(w for w in outside if w.split != "vocab")))
    vocab = [w for w in outside if w.split == "vocab"] * (2 if architecture.tied and pp > 1 else 1)
    rows = -(-architecture.vocab_size // (128 * tp)) * 128 * tp
    padding = sum((rows - architecture.vocab_size) * w.shape[-1] for w in vocab)
    again = sum(w.numel for w in architecture.embedding if architecture.tied and pp > 1)
    assert tp * (dense - copied) + copied == made.parameters - experts + padding + again


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(MODELS)), POWERS, POWERS, POWERS, st.sampled_from(["tp", "pp", "ep", "etp"]))
def test_one_dimension_twice_as_large_never_gives_a_rank_more_parameters(
    name: str, tp: int, pp: int, ep: int, which: str
):
    architecture = read_architecture(MODELS[name].facts)
    layers, sizes_now = len(architecture.layers), {"tp": tp, "pp": pp, "ep": ep, "etp": 1}
    # Stages of the longer pipeline lie within those of the shorter one.
    assume(layers % (2 * pp) == 0)
    more = sizes_now | {which: 2 * sizes_now[which]}
    before, after = (layout_sizes(name, 4096, **at) for at in (sizes_now, more))
    assert max(s.parameters for s in after.stages) <= max(s.parameters for s in before.stages)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(MODELS)), st.integers(0, 4))
def test_more_data_parallel_ranks_divide_the_optimizer_and_nothing_else(name: str, doublings: int):
    few, many = (layout_sizes(name, 8 * 2**n, 1, 1, 1, 1) for n in (0, doublings))
    assert many.gpu["params"] == few.gpu["params"]
    assert many.gpu["grads"] == few.gpu["grads"]
    assert 0 <= many.stages[0].shard * 2**doublings - few.stages[0].shard <= 2 * 2**doublings


# -- host, what is always there ----------------------------------------------------------------------


def test_ranks_that_load_little_are_not_counted_at_what_large_models_were_seen_to_hold():
    pair = sizes("--model qwen3-0.6b --hardware H200 --num-nodes 1 --num-gpus-per-node 2")
    # 2 × H200 held 0.4 GB a GPU (benchmarks/results/2026-11-29-handoff-h200.md).
    assert pair.static_host["distributed"] == 2 * (2e9 + 4 * 596_049_920)
    assert sizes(MOE).static_host["distributed"] == 8 * 17e9
    assert (
        "distributed" not in sizes("--model qwen3-0.6b --hardware H200 --num-nodes 1 --num-gpus-per-node 1").static_host
    )


def test_context_parallel_ranks_keep_the_keys_and_values_they_read_unless_attention_is_computed_again():
    def activations(more: str) -> int:
        words = f"{SMALL} --max-tokens-per-gpu 8192 --rollout-max-response-len 8192 --megatron-transformer-impl transformer_engine"
        return sizes(f"{words} {more}").gpu["activations"]

    # Of four ranks each has two of eight chunks, which read 9 in all: 4.5 times its 8192 tokens, 8 heads of 128, in bf16.
    own = 8192 * 2 * 8 * 128 * 2
    assert activations("--context-parallel-size 4") - activations("") == 28 * (4.5 - 1) * own
    # Computed again, one layer's are there at a time, and beside those that are read those of all ranks.
    again = activations("--context-parallel-size 4 --recompute-granularity selective")
    assert again - activations("--recompute-granularity selective") == (4 + 4.5) * own


@pytest.mark.parametrize("again", ["none", "selective"])
def test_context_parallel_ranks_keep_the_heads_keys_of_latents_and_values_as_wide_as_keys_beside_them(again: str):
    def activations(cp: int) -> int:
        words = "--model deepseek-v3 --hardware H200 --num-nodes 2 --tensor-model-parallel-size 4 --expert-model-parallel-size 16 "
        words += (
            "--megatron-transformer-impl transformer_engine --max-tokens-per-gpu 8192 --rollout-max-response-len 8192 "
        )
        return sizes(f"{words} --context-parallel-size {cp} --recompute-granularity {again}").gpu["activations"]

    # A head's key is 128 + 64 wide, its value 128, of which attention takes a copy that is 192 wide. 32 heads a rank.
    read, all_ranks = 2.5 * 32 * (192 + 128 + 192), 2 * 32 * (192 + 128)
    made_of_latents = 32 * (128 + 128)
    per_token = 61 * (read - made_of_latents) if again == "none" else read + all_ranks
    assert activations(2) - activations(1) == 8192 * 2 * per_token


# -- the update ------------------------------------------------------------------------------------

BUCKET = 512 * 2**20


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("again", ["none", "selective", "full"])
def test_linear_attention_that_is_computed_again_holds_its_numbers_of_whole_samples(
    again: str, cp: int, monkeypatch: pytest.MonkeyPatch
):
    words = f"--model qwen3.5-27b {H100} --tensor-model-parallel-size 2 --max-tokens-per-gpu 8192"
    words += f" --rollout-max-response-len 4096 --recompute-granularity {again} --context-parallel-size {cp}"
    held = sizes(words).gpu["activations"]
    monkeypatch.setattr(c, "DELTA_RULE_BYTES", replace(c.DELTA_RULE_BYTES, value=0.0))
    # Of the keys and values of its full attention, 4 heads of 256, less is held at a time.
    gathered = (cp + cp + 0.5) * 2 * 2 * 1024 // 2 if again == "selective" and cp > 1 else 0
    assert held - sizes(words).gpu["activations"] == 8192 * (cp * 110 * 48 * 128 // 2 - gathered)


def test_context_parallel_ranks_keep_the_inputs_of_linear_attention_of_whole_samples():
    def activations(cp: int) -> int:
        words = f"--model qwen3.5-27b {H100} --max-tokens-per-gpu 8192 --rollout-max-response-len 4096"
        return sizes(f"{words} --context-parallel-size {cp}").gpu["activations"]

    # 48 linear layers with 16 key heads and 48 value heads of 128, values gated, two numbers of each head's state.
    inputs = 48 * 2 * (2 * 16 * 128 + 2 * 48 * 128 + 2 * 48)
    read = 16 * 2 * (2.5 - 1) * 2 * 1024  # of full attention: 4 key heads of 256
    again = 110 * 48 * 128
    assert activations(2) - activations(1) == 8192 * (inputs + read + again)


def test_an_update_of_gpt_oss_brings_a_layers_experts_in_one_tensor():
    """Gate and up projection of all experts, in both buckets and once beside them."""
    stack = 2 * 128 * 2880 * 2 * 2880
    assert sizes(f"--model gpt-oss-120b {H100}").gpu["update_bucket"] == 3 * stack
    embedding, small = 2 * 201088 * 2880, 2 * 32 * 2880 * 2 * 2880  # larger than the stack: it and the head are alone
    assert sizes(f"--model gpt-oss-20b {H100}").gpu["update_bucket"] == 2 * embedding + small


def test_both_buckets_of_an_update_may_meet_a_matrix_larger_than_they_are():
    tied, untied = (sizes(f"--model {name} {H100}").gpu["update_bucket"] for name in ("qwen3-4b", "qwen3-8b"))
    assert tied == BUCKET + 2 * 151936 * 2560
    assert untied == 2 * (2 * 151936 * 4096)
    # Where ranks share it, its shards and the whole of one come on top.
    shared = sizes(f"--model qwen3-8b {H100} --tensor-model-parallel-size 2").gpu["update_bucket"]
    assert shared == 2 * untied


def test_an_update_in_fp8_also_holds_what_it_is_quantised_to_and_with():
    words = f"--model qwen3-4b {H100} --rollout-dtype fp8"
    more = sizes(words).gpu["update_bucket"] - sizes(f"--model qwen3-4b {H100}").gpu["update_bucket"]
    assert more == 9 * 2560 * 9728  # a byte, and all its rows twice in float32
