"""Facts of released models under the names of their `config.json`, and how many parameters they have.

The numbers were counted by transformers 5.23.0 on the meta device and agree with a closed form. MTP layers, vision
and audio towers, and the correction biases of routers are not in them.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Model(NamedTuple):
    source: str
    parameters: int
    facts: dict[str, Any]


MODELS: dict[str, Model] = {
    # Qwen/Qwen3-0.6B
    "qwen3-0.6b": Model(
        "radixark/miles@31f1ca9 scripts/models/qwen3-0.6B.py",
        596049920,
        {
            "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "num_attention_heads": 16,
            "num_hidden_layers": 28, "tie_word_embeddings": True, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": 3072, "attention_bias": False,
        },
    ),
    # Qwen/Qwen3-1.7B
    "qwen3-1.7b": Model(
        "radixark/miles@31f1ca9 scripts/models/qwen3-1.7B.py",
        1720574976,
        {
            "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2048, "num_attention_heads": 16,
            "num_hidden_layers": 28, "tie_word_embeddings": True, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": 6144, "attention_bias": False,
        },
    ),
    # Qwen/Qwen3-4B
    "qwen3-4b": Model(
        "radixark/miles@31f1ca9 scripts/models/qwen3-4B.py",
        4022468096,
        {
            "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2560, "num_attention_heads": 32,
            "num_hidden_layers": 36, "tie_word_embeddings": True, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": 9728, "attention_bias": False,
        },
    ),
    # Qwen/Qwen3-8B
    "qwen3-8b": Model(
        "radixark/miles@31f1ca9 scripts/models/qwen3-8B.py",
        8190735360,
        {
            "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "num_attention_heads": 32,
            "num_hidden_layers": 36, "tie_word_embeddings": False, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": 12288, "attention_bias": False,
        },
    ),
    # Qwen/Qwen3-14B
    "qwen3-14b": Model(
        "radixark/miles@31f1ca9 scripts/models/qwen3-14B.py",
        14768307200,
        {
            "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 5120, "num_attention_heads": 40,
            "num_hidden_layers": 40, "tie_word_embeddings": False, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": 17408, "attention_bias": False,
        },
    ),
    # Qwen/Qwen3-32B
    "qwen3-32b": Model(
        "radixark/miles@31f1ca9 scripts/models/qwen3-32B.py",
        32762123264,
        {
            "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 5120, "num_attention_heads": 64,
            "num_hidden_layers": 64, "tie_word_embeddings": False, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": 25600, "attention_bias": False,
        },
    ),
    # Qwen/Qwen3-30B-A3B
    "qwen3-30b-a3b": Model(
        "radixark/miles@31f1ca9 scripts/models/qwen3-30B-A3B.py",
        30532122624,
        {
            "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "num_attention_heads": 32,
            "num_hidden_layers": 48, "tie_word_embeddings": False, "num_key_value_heads": 4, "head_dim": 128,
            "attention_bias": False, "num_experts_per_tok": 8, "num_experts": 128, "moe_intermediate_size": 768,
        },
    ),
    # Qwen/Qwen3-235B-A22B
    "qwen3-235b-a22b": Model(
        "radixark/miles@31f1ca9 scripts/models/qwen3-235B-A22B.py",
        235093634560,
        {
            "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 4096, "num_attention_heads": 64,
            "num_hidden_layers": 94, "tie_word_embeddings": False, "num_key_value_heads": 4, "head_dim": 128,
            "attention_bias": False, "num_experts_per_tok": 8, "num_experts": 128, "moe_intermediate_size": 1536,
        },
    ),
    # deepseek-ai/DeepSeek-V3 (R1, V3.1 same shape)
    "deepseek-v3": Model(
        "radixark/miles@31f1ca9 scripts/models/deepseek-v3.py; transformers 5.23.0 DeepseekV3Config defaults",
        671026404352,
        {
            "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "num_attention_heads": 128,
            "num_hidden_layers": 61, "tie_word_embeddings": False, "num_key_value_heads": 128, "q_lora_rank": 1536,
            "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "intermediate_size": 18432, "num_experts_per_tok": 8, "n_routed_experts": 256,
            "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3,
            "num_nextn_predict_layers": 1,
        },
    ),
    # deepseek-ai/DeepSeek-V3.2
    "deepseek-v3.2": Model(
        "radixark/miles@31f1ca9 scripts/models/deepseek-v32.py; transformers 5.23.0 DeepseekV32Config defaults (indexer sizes)",
        671877929216,
        {
            "model_type": "deepseek_v32", "vocab_size": 129280, "hidden_size": 7168, "num_attention_heads": 128,
            "num_hidden_layers": 61, "tie_word_embeddings": False, "num_key_value_heads": 128, "q_lora_rank": 1536,
            "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "intermediate_size": 18432, "num_experts_per_tok": 8, "n_routed_experts": 256,
            "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3, "index_n_heads": 64,
            "index_head_dim": 128, "num_nextn_predict_layers": 1,
        },
    ),
    # deepseek-ai/DeepSeek-V4-Flash
    "deepseek-v4-flash": Model(
        "radixark/miles@31f1ca9 scripts/models/deepseek-v4-flash.py; transformers 5.23.0 models/deepseek_v4",
        284332230231,
        {
            "model_type": "deepseek_v4", "vocab_size": 129280, "hidden_size": 4096, "num_attention_heads": 64,
            "num_hidden_layers": 43, "tie_word_embeddings": False, "num_key_value_heads": 1, "head_dim": 512,
            "num_experts_per_tok": 6, "n_routed_experts": 256, "moe_intermediate_size": 2048, "n_shared_experts": 1,
            "index_n_heads": 64, "index_head_dim": 128, "q_lora_rank": 1024, "qk_rope_head_dim": 64, "o_groups": 8,
            "o_lora_rank": 1024, "hc_mult": 4, "sliding_window": 128,
            "compress_ratios": [0, 0, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4],
            "num_nextn_predict_layers": 1,
        },
    ),
    # deepseek-ai/DeepSeek-V4-Pro
    "deepseek-v4-pro": Model(
        "radixark/miles@31f1ca9 scripts/models/deepseek-v4-pro.py; transformers 5.23.0 models/deepseek_v4",
        1572997179491,
        {
            "model_type": "deepseek_v4", "vocab_size": 129280, "hidden_size": 7168, "num_attention_heads": 128,
            "num_hidden_layers": 61, "tie_word_embeddings": False, "num_key_value_heads": 1, "head_dim": 512,
            "num_experts_per_tok": 6, "n_routed_experts": 384, "moe_intermediate_size": 3072, "n_shared_experts": 1,
            "index_n_heads": 64, "index_head_dim": 128, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "o_groups": 16,
            "o_lora_rank": 1024, "hc_mult": 4, "sliding_window": 128,
            "compress_ratios": [128, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4],
            "num_nextn_predict_layers": 1,
        },
    ),
    # moonshotai/Kimi-K2-Instruct (K2-Thinking, K2.5, K2.6 same text shape)
    "kimi-k2": Model(
        "radixark/miles@31f1ca9 scripts/models/kimi-k2.py, kimi-k2-thinking.py, kimi-k25.py",
        1026408209408,
        {
            "model_type": "deepseek_v3", "vocab_size": 163840, "hidden_size": 7168, "num_attention_heads": 64,
            "num_hidden_layers": 61, "tie_word_embeddings": False, "num_key_value_heads": 64, "q_lora_rank": 1536,
            "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "intermediate_size": 18432, "num_experts_per_tok": 8, "n_routed_experts": 384,
            "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 0,
        },
    ),
    # zai-org/GLM-4.5-Air
    "glm-4.5-air": Model(
        "radixark/miles@31f1ca9 scripts/models/glm4.5-106B-A12B.py",
        106852245504,
        {
            "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 4096, "num_attention_heads": 96,
            "num_hidden_layers": 46, "tie_word_embeddings": False, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": 10944, "attention_bias": True, "num_experts_per_tok": 8, "n_routed_experts": 128,
            "moe_intermediate_size": 1408, "n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": False,
            "num_nextn_predict_layers": 1,
        },
    ),
    # zai-org/GLM-4.5 / 4.6 / 4.7
    "glm-4.5": Model(
        "radixark/miles@31f1ca9 scripts/models/glm4.5-355B-A32B.py",
        352797814784,
        {
            "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 5120, "num_attention_heads": 96,
            "num_hidden_layers": 92, "tie_word_embeddings": False, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": 12288, "attention_bias": True, "num_experts_per_tok": 8, "n_routed_experts": 160,
            "moe_intermediate_size": 1536, "n_shared_experts": 1, "first_k_dense_replace": 3, "use_qk_norm": True,
            "num_nextn_predict_layers": 1,
        },
    ),
    # zai-org/GLM-4.7-Flash
    "glm-4.7-flash": Model(
        "radixark/miles@31f1ca9 scripts/models/glm4.7-flash.py; transformers 5.23.0 Glm4MoeLiteConfig defaults",
        29943390976,
        {
            "model_type": "glm4_moe_lite", "vocab_size": 154880, "hidden_size": 2048, "num_attention_heads": 20,
            "num_hidden_layers": 47, "tie_word_embeddings": False, "num_key_value_heads": 20, "q_lora_rank": 768,
            "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
            "intermediate_size": 10240, "num_experts_per_tok": 4, "n_routed_experts": 64,
            "moe_intermediate_size": 1536, "n_shared_experts": 1, "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 1,
        },
    ),
    # zai-org/GLM-5 / 5.1 / 5.2
    "glm-5": Model(
        "radixark/miles@31f1ca9 scripts/models/glm5-744B-A40B.py; transformers 5.23.0 GlmMoeDsaConfig defaults",
        743911199232,
        {
            "model_type": "glm_moe_dsa", "vocab_size": 154880, "hidden_size": 6144, "num_attention_heads": 64,
            "num_hidden_layers": 78, "tie_word_embeddings": False, "num_key_value_heads": 64, "q_lora_rank": 2048,
            "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
            "intermediate_size": 12288, "num_experts_per_tok": 8, "n_routed_experts": 256,
            "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3, "index_n_heads": 32,
            "index_head_dim": 128, "num_nextn_predict_layers": 1,
        },
    ),
    # zai-org/GLM-5.2
    "glm-5.2": Model(
        "radixark/miles@31f1ca9 scripts/models/glm5.2-744B-A40B.py; THUDM/slime@624b824 scripts/models/glm5.2-744B-A40B.sh:13-18; transformers 5.23.0 GlmMoeDsaConfig",
        743377000704,
        {
            "model_type": "glm_moe_dsa", "vocab_size": 154880, "hidden_size": 6144, "num_attention_heads": 64,
            "num_hidden_layers": 78, "tie_word_embeddings": False, "num_key_value_heads": 64, "q_lora_rank": 2048,
            "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
            "intermediate_size": 12288, "num_experts_per_tok": 8, "n_routed_experts": 256,
            "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3, "index_n_heads": 32,
            "index_head_dim": 128, "index_topk_freq": 4, "index_skip_topk_offset": 3, "num_nextn_predict_layers": 1,
        },
    ),
    # openai/gpt-oss-20b
    "gpt-oss-20b": Model(
        "radixark/miles@31f1ca9 scripts/models/gpt-oss-20b.py; transformers 5.23.0 models/gpt_oss",
        20914757184,
        {
            "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "num_attention_heads": 64,
            "num_hidden_layers": 24, "tie_word_embeddings": False, "num_key_value_heads": 8, "head_dim": 64,
            "num_experts_per_tok": 4, "num_local_experts": 32, "intermediate_size": 2880,
        },
    ),
    # openai/gpt-oss-120b
    "gpt-oss-120b": Model(
        "transformers 5.23.0 GptOssConfig defaults",
        116829156672,
        {
            "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "num_attention_heads": 64,
            "num_hidden_layers": 36, "tie_word_embeddings": False, "num_key_value_heads": 8, "head_dim": 64,
            "num_experts_per_tok": 4, "num_local_experts": 128, "intermediate_size": 2880,
        },
    ),
    # meta-llama/Llama-3.2-1B
    "llama3.2-1b": Model(
        "models.csv",
        1235814400,
        {
            "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "num_attention_heads": 32,
            "num_hidden_layers": 16, "tie_word_embeddings": True, "num_key_value_heads": 8, "head_dim": 64,
            "intermediate_size": 8192, "attention_bias": False,
        },
    ),
    # meta-llama/Llama-3.2-3B
    "llama3.2-3b": Model(
        "radixark/miles@31f1ca9 scripts/models/llama3.2-3B-Instruct.py",
        3212749824,
        {
            "model_type": "llama", "vocab_size": 128256, "hidden_size": 3072, "num_attention_heads": 24,
            "num_hidden_layers": 28, "tie_word_embeddings": True, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": 8192, "attention_bias": False,
        },
    ),
    # meta-llama/Llama-3.1-8B
    "llama3.1-8b": Model(
        "radixark/miles@31f1ca9 scripts/models/llama3.1-8B-Instruct.py",
        8030261248,
        {
            "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "num_attention_heads": 32,
            "num_hidden_layers": 32, "tie_word_embeddings": False, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": 14336, "attention_bias": False,
        },
    ),
    # meta-llama/Llama-3.1-70B (3.3-70B)
    "llama3.1-70b": Model(
        "models.csv",
        70553706496,
        {
            "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "num_attention_heads": 64,
            "num_hidden_layers": 80, "tie_word_embeddings": False, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": 28672, "attention_bias": False,
        },
    ),
    # meta-llama/Llama-3.1-405B
    "llama3.1-405b": Model(
        "models.csv",
        405853388800,
        {
            "model_type": "llama", "vocab_size": 128256, "hidden_size": 16384, "num_attention_heads": 128,
            "num_hidden_layers": 126, "tie_word_embeddings": False, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": 53248, "attention_bias": False,
        },
    ),
    # Qwen/Qwen3.8-27B
    "qwen3.8-27b": Model(
        "radixark/miles@31f1ca9 scripts/models/qwen3.5-27B.py (qwen3.8-27B.py defers to it); docs/models/qwen/qwen3-8.md (48 value heads of 128)",
        26895998464,
        {
            "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 5120, "num_attention_heads": 24,
            "num_hidden_layers": 64, "tie_word_embeddings": False, "num_key_value_heads": 4, "head_dim": 256,
            "intermediate_size": 17408, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
        },
    ),
    # Qwen/Qwen2.5-0.5B-Instruct
    "qwen2.5-0.5b": Model(
        "radixark/miles@31f1ca9 scripts/models/qwen2.5-0.5B.py",
        494032768,
        {
            "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "num_attention_heads": 14,
            "num_hidden_layers": 24, "tie_word_embeddings": True, "num_key_value_heads": 2, "head_dim": 64,
            "intermediate_size": 4864,
        },
    ),
    # Qwen/Qwen3.5-27B
    "qwen3.5-27b": Model(
        "radixark/miles@31f1ca9 scripts/models/qwen3.5-27B.py; linear key heads: class default of transformers",
        26895998464,
        {
            "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 5120, "num_attention_heads": 24,
            "num_hidden_layers": 64, "tie_word_embeddings": False, "num_key_value_heads": 4, "head_dim": 256,
            "intermediate_size": 17408, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
        },
    ),
    # Qwen/Qwen3.5-35B-A3B
    "qwen3.5-35b-a3b": Model(
        "radixark/miles@31f1ca9 scripts/models/qwen3.5-35B-A3B.py; transformers 5.23.0 Qwen3_5MoeTextConfig defaults",
        34660610688,
        {
            "model_type": "qwen3_5_moe_text", "vocab_size": 248320, "hidden_size": 2048, "num_attention_heads": 16,
            "num_hidden_layers": 40, "tie_word_embeddings": False, "num_key_value_heads": 2, "head_dim": 256,
            "num_experts_per_tok": 8, "num_experts": 256, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4, "mtp_num_hidden_layers": 1,
        },
    ),
    # Qwen/Qwen3-Next-80B-A3B-Thinking
    "qwen3-next-80b-a3b": Model(
        "radixark/miles@31f1ca9 scripts/models/qwen3-next-80B-A3B.py; transformers 5.23.0 Qwen3NextConfig defaults",
        79674391296,
        {
            "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048, "num_attention_heads": 16,
            "num_hidden_layers": 48, "tie_word_embeddings": False, "num_key_value_heads": 2, "head_dim": 256,
            "num_experts_per_tok": 10, "num_experts": 512, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
        },
    ),
    # MiniMaxAI/MiniMax-M2.5
    "minimax-m2.5": Model(
        "THUDM/slime@624b824 scripts/models/minimax-m2.sh; transformers 5.23.0 MiniMaxM2Config defaults",
        228689748992,
        {
            "model_type": "minimax_m2", "vocab_size": 200064, "hidden_size": 3072, "num_attention_heads": 48,
            "num_hidden_layers": 62, "tie_word_embeddings": False, "num_key_value_heads": 8, "head_dim": 128,
            "num_experts_per_tok": 8, "num_local_experts": 256, "intermediate_size": 1536,
        },
    ),
    # moonshotai/Moonlight-16B-A3B
    "moonlight-16b-a3b": Model(
        "THUDM/slime@624b824 scripts/models/moonlight.sh",
        15960108544,
        {
            "model_type": "deepseek_v3", "vocab_size": 163840, "hidden_size": 2048, "num_attention_heads": 16,
            "num_hidden_layers": 27, "tie_word_embeddings": False, "num_key_value_heads": 16, "q_lora_rank": None,
            "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "intermediate_size": 11264, "num_experts_per_tok": 6, "n_routed_experts": 64,
            "moe_intermediate_size": 1408, "n_shared_experts": 2, "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 0,
        },
    ),
    # JoyAI-LLM-Flash
    "joyai-llm-flash": Model(
        "radixark/miles@31f1ca9 scripts/models/joyai-llm-flash.py",
        48942532608,
        {
            "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 2048, "num_attention_heads": 32,
            "num_hidden_layers": 40, "tie_word_embeddings": False, "num_key_value_heads": 32, "q_lora_rank": 1536,
            "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "intermediate_size": 7168, "num_experts_per_tok": 8, "n_routed_experts": 256,
            "moe_intermediate_size": 768, "n_shared_experts": 1, "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 0,
        },
    ),
    # nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16
    "nemotron-3-nano-30b-a3b": Model(
        "radixark/miles@31f1ca9 scripts/models/nemotron-3-nano-30b-a3b.py; assumed: layer pattern and Mamba sizes",
        31577937344,
        {
            "model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 2688, "num_attention_heads": 32,
            "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 1856, "num_experts_per_tok": 6,
            "n_routed_experts": 128, "moe_intermediate_size": 1856, "n_shared_experts": 1,
            "moe_shared_expert_intermediate_size": 3712,
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "mamba_num_heads": 64,
            "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
        },
    ),
    # thinkingmachines/Inkling
    "inkling": Model(
        "radixark/miles@31f1ca9 scripts/models/inkling.py; transformers 5.23.0 InklingTextConfig defaults",
        975340270146,
        {
            "model_type": "inkling_text", "vocab_size": 201024, "hidden_size": 6144, "num_attention_heads": 64,
            "num_hidden_layers": 66, "num_key_value_heads": 8, "head_dim": 128, "num_experts_per_tok": 6,
            "n_routed_experts": 256, "moe_intermediate_size": 3072, "n_shared_experts": 2,
            "swa_num_attention_heads": 64, "swa_num_key_value_heads": 16, "swa_head_dim": 128, "d_rel": 16,
            "rel_extent": 1024, "sliding_window_size": 512, "conv_kernel_size": 4,
        },
    ),
}  # fmt: skip
