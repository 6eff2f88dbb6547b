"""A KV cache in memory that is allocated beforehand: tokens are written in place, attention reads views."""

# B rows, U unique prompts, H KV heads, T tokens, D size of a head

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from rllaunch.backends.embedded.layout import Layout, lay_out
from rllaunch.backends.embedded.model import text_config
from rllaunch.backends.embedded.pool import FlatBuffer
from rllaunch.errors import RunError

_SERVED_LAYERS = {"full_attention", "sliding_attention", "attention"}


@dataclass(frozen=True)
class LayerShape:
    """What one layer caches for a token: (heads, size) of its keys and of its values."""

    key_HD: tuple[int, int]
    value_HD: tuple[int, int]


def attends_by_token(model: nn.Module) -> bool:
    """Whether each layer attends to keys and values of single tokens, any of which a mask can hide.

    Such a model can be served from a `FlatCache` and run on padded batches. One with recurrent state, convolutions,
    pooled tokens or an indexer cannot: its padding has an effect, and it caches something else.
    """
    config: Any = text_config(model)
    attention = _first_attention(model)
    has_kv_projections = hasattr(attention, "k_proj") or hasattr(attention, "qkv_proj")
    return set(getattr(config, "layer_types", None) or ()) <= _SERVED_LAYERS and (
        has_kv_projections or _has_latents(attention)
    )


def layer_shapes(model: nn.Module) -> tuple[LayerShape, ...]:
    """What each layer caches, from the model's config.

    Of a model that does not attend by token (`attends_by_token`) it is what plain attention of its sizes would
    cache, so that the region is there and of the usual size; nothing for a model without heads.
    """
    config: Any = text_config(model)
    attention = _first_attention(model)
    num_layers: int = config.num_hidden_layers
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        return ()
    if _has_latents(attention):
        if hasattr(attention, "expand_kv"):  # transformers >= 5.20 caches the latents, older ones what they expand to
            shape = LayerShape((1, config.kv_lora_rank), (1, config.qk_rope_head_dim))
        else:
            shape = LayerShape((heads, config.qk_nope_head_dim + config.qk_rope_head_dim), (heads, config.v_head_dim))
        return (shape,) * num_layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return (LayerShape((kv_heads, head_dim), (kv_heads, head_dim)),) * num_layers


def _first_attention(model: nn.Module) -> nn.Module | None:
    return next((m for name, m in model.named_modules() if name.endswith("layers.0.self_attn")), None)


def _has_latents(attention: nn.Module | None) -> bool:
    return hasattr(attention, "kv_a_proj_with_mqa") and not hasattr(attention, "indexer")


def cache_layout(shapes: Sequence[LayerShape], num_rows: int, num_tokens: int, dtype: torch.dtype) -> Layout:
    """Where keys and values lie in the region: [rows, heads, tokens, size], layer after layer."""

    def tensor(shape_HD: tuple[int, int]) -> Tensor:
        heads, size = shape_HD
        return torch.empty(num_rows, heads, num_tokens, size, dtype=dtype, device="meta")

    named = [
        (f"{kind}.{i}", tensor(shape_HD))
        for i, shape in enumerate(shapes)
        for kind, shape_HD in (("keys", shape.key_HD), ("values", shape.value_HD))
    ]
    return lay_out([("kv_cache", named)])


class FlatLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values, [B, H, T, D] views of the region.

    The first `update` of a batch may bring one row a unique prompt; it is written to every row that asks that
    prompt, while attention over the prompt runs on the unique rows alone.
    """

    is_sliding = False  # a window is cut by the mask; all tokens are kept

    def __init__(self, key_BHTD: Tensor, value_BHTD: Tensor) -> None:
        super().__init__()
        self.keys: Tensor = key_BHTD
        self.values: Tensor = value_BHTD
        self.is_initialized = True
        self.start(0, None)

    def start(self, num_rows: int, prompt_of_row_B: Tensor | None) -> None:
        """Forget all tokens; the next ones are of `num_rows` rows, or of the prompts that `prompt_of_row_B` maps to."""
        self.num_rows = num_rows
        self.num_tokens = 0
        self.prompt_of_row_B = prompt_of_row_B

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        B, begin, end = self.num_rows, self.num_tokens, self.num_tokens + key_states.shape[2]
        if key_states.shape[1::2] != self.keys.shape[1::2] or value_states.shape[1::2] != self.values.shape[1::2]:
            raise RunError(
                f"the model caches {list(key_states.shape)} and {list(value_states.shape)} in a layer; its config "
                f"says [.., {self.keys.shape[1]}, .., {self.keys.shape[3]}] and "
                f"[.., {self.values.shape[1]}, .., {self.values.shape[3]}]"
            )
        self.num_tokens = end
        if begin == 0 and self.prompt_of_row_B is not None:
            torch.index_select(key_states, 0, self.prompt_of_row_B, out=self._own(self.keys, B, end))
            torch.index_select(value_states, 0, self.prompt_of_row_B, out=self._own(self.values, B, end))
            return key_states, value_states
        self.keys[:B, :, begin:end] = key_states
        self.values[:B, :, begin:end] = value_states
        return self.keys[:B, :, :end], self.values[:B, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_tokens + query_length, 0

    def get_seq_length(self) -> int:
        return self.num_tokens

    def get_max_length(self) -> int:
        return self.keys.shape[2]

    get_max_cache_shape = get_max_length  # its name before transformers 5.2x

    @staticmethod
    def _own(cached_BHTD: Tensor, num_rows: int, num_tokens: int) -> Tensor:
        return cached_BHTD[:num_rows, :, :num_tokens]


class FlatCache(Cache):  # type: ignore[misc]
    """The cache of all layers, as views of the `kv_cache` region; rebuilt cheaply, never resized."""

    def __init__(self, layout: Layout, buffer: FlatBuffer) -> None:
        views = layout.views(buffer)
        num_layers = len(views) // 2
        super().__init__(layers=[FlatLayer(views[f"keys.{i}"], views[f"values.{i}"]) for i in range(num_layers)])

    def start(self, num_rows: int, prompt_of_row_B: Tensor | None = None) -> None:
        for layer in self.layers:
            layer.start(num_rows, prompt_of_row_B)
