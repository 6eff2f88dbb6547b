"""Which tensors of a Hugging Face checkpoint each Megatron-core parameter is made of, and the two layouts of each.

Layer and expert numbers are the whole model's; which of them a rank holds is `placement`'s business. Plain torch.
Source: Megatron-core 0.16.1 transformer/{attention,mlp,multi_latent_attention}.py for its layouts; names of
checkpoints as transformers 5.23.0 saves them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rllaunch.backends.deepseek_v4_names import release_name
from rllaunch.backends.megatron.shape import ModelShape

Form = Literal["plain", "vocab", "qkv", "gated", "turned", "woven", "gated_qkv", "delta_in", "delta_conv"]


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter of the whole model.

    Args:
        names: what it may be called, local modules first, those of Transformer Engine after; `{layer}` and `{expert}`
            stand for a rank's own numbers.
        sources: the checkpoint's tensors, in the order they lie in the parameter.
        form: `plain` one tensor as it is; `vocab` one with rows to pad; `qkv` queries, keys and values interleaved by
            group of key heads; `gated` gate and up projection, one after the other on each rank; `turned` one that has
            input features first; `woven` as `gated`, of one tensor that has input features first, if it has any, and
            outputs of gate and up projection in turn; `gated_qkv` as `qkv`, gates of the output behind the queries of a
            group; `delta_in` and `delta_conv` all inputs of linear attention and the kernels of its convolution, by key
            head.
        split: the dimension ranks share, where they do.
        layer, expert: 0-based, of the whole model; None outside of them.
        is_copy: of another entry's values: it is filled, but never read.
        is_adapter: half of a LoRA adapter: checkpoints of the state have it, engines get it merged.
    """

    names: tuple[str, ...]
    sources: tuple[str, ...]
    form: Form = "plain"
    split: int | None = None
    layer: int | None = None
    expert: int | None = None
    is_copy: bool = False
    is_adapter: bool = False

    @property
    def is_sent(self) -> bool:
        return not (self.is_copy or self.is_adapter)

    @property
    def has_halves(self) -> bool:
        """Each rank has a part of the first half of the rows, and the same part of the second."""
        return self.form in ("gated", "woven")

    @property
    def is_rearranged(self) -> bool:
        """Its elements lie in another order in the checkpoint: `from_megatron` copies all of them."""
        return self.form in ("qkv", "turned", "woven", "gated_qkv", "delta_in", "delta_conv")


@dataclass(frozen=True)
class _ExpertNames:
    """What a checkpoint calls a layer with experts, an expert's matrices, and the bias of the router."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    bias: str = "gate.e_score_correction_bias"


# Families whose checkpoints name experts otherwise than their modules do: as Mixtral's.
_RENAMED = {"minimax_m2": _ExpertNames("block_sparse_moe", "w1", "w3", "w2", "e_score_correction_bias")}


def _names_of_experts(shape: ModelShape) -> _ExpertNames:
    return _RENAMED.get(shape.model_type, _ExpertNames())


def entries(shape: ModelShape) -> list[Entry]:
    """All parameters of the model in the order of its checkpoint; the same on every rank."""
    embedding = "model.embed_tokens.weight"
    made = [Entry(("embedding.word_embeddings.weight",), (embedding,), "vocab", 0)]
    experts = _stacked_experts if shape.experts and shape.experts.is_stacked else _experts
    for layer in range(shape.num_layers):
        made += _linear_attention(shape, layer) if shape.is_linear(layer) else _attention(shape, layer)
        made += experts(shape, layer) if shape.is_sparse(layer) else _dense(layer)
        made += _norms(shape, layer)
        made += _streams(layer) if shape.streams else ()
    if shape.streams:
        for part in ("hc_fn", "hc_base", "hc_scale"):
            made.append(Entry((f"decoder.final_layernorm.{part}",), (f"model.hc_head.{part}",)))
    made.append(Entry(("decoder.final_layernorm.weight",), ("model.norm.weight",)))
    head = embedding if shape.is_tied else "lm_head.weight"
    made.append(Entry(("output_layer.weight",), (head,), "vocab", 0, is_copy=shape.is_tied))
    return made


def _attention(shape: ModelShape, layer: int) -> Iterator[Entry]:
    at, of = "decoder.layers.{layer}.self_attention", f"model.layers.{layer}.self_attn"
    if shape.compressed:
        yield from _compressed_attention(shape.compressed.kinds[layer], at, of, layer)
        return
    if shape.latent:
        yield from _latent_attention(shape.latent.q_rank is not None, at, of, layer)
    else:
        for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
            sources = tuple(f"{of}.{part}_proj.{kind}" for part in "qkv")
            form: Form = "gated_qkv" if shape.has_output_gate else "qkv"
            yield Entry((f"{at}.linear_qkv.{kind}",), sources, form, 0, layer)
    yield Entry((f"{at}.linear_proj.weight",), (f"{of}.o_proj.weight",), split=1, layer=layer)
    if shape.linear_bias:
        yield Entry((f"{at}.linear_proj.bias",), (f"{of}.o_proj.bias",), layer=layer)
    if shape.has_sinks:
        yield Entry((f"{at}.core_attention.softmax_offset",), (f"{of}.sinks",), split=0, layer=layer)
    if shape.qk_norm != "none":
        for part in "qk":
            yield Entry((f"{at}.{part}_layernorm.weight",), (f"{of}.{part}_norm.weight",), layer=layer)


def _linear_attention(shape: ModelShape, layer: int) -> Iterator[Entry]:
    assert shape.delta_net is not None, "asked for a layer with linear attention only"
    at, of = "decoder.layers.{layer}.self_attention", f"model.layers.{layer}.linear_attn"
    inputs = ("qkvz", "ba") if shape.delta_net.is_fused else ("qkv", "z", "b", "a")
    sources = tuple(f"{of}.in_proj_{part}.weight" for part in inputs)
    yield Entry((f"{at}.in_proj.weight",), sources, "delta_in", 0, layer)
    yield Entry((f"{at}.conv_weight",), (f"{of}.conv1d.weight",), "delta_conv", 0, layer)
    for name in ("dt_bias", "A_log"):
        yield Entry((f"{at}.{name}",), (f"{of}.{name}",), split=0, layer=layer)
    yield Entry((f"{at}.norm_weight",), (f"{of}.norm.weight",), layer=layer)
    yield Entry((f"{at}.out_proj.weight",), (f"{of}.out_proj.weight",), split=1, layer=layer)


def _latent_attention(has_query_latent: bool, at: str, of: str, layer: int) -> Iterator[Entry]:
    latents = [("kv", "kv_a_proj_with_mqa", "kv_b_proj")]
    if has_query_latent:
        latents.insert(0, ("q", "q_a_proj", "q_b_proj"))
    else:
        yield Entry((f"{at}.linear_q_proj.weight",), (f"{of}.q_proj.weight",), split=0, layer=layer)
    # One after the other: a weight update may not part them (`joined_with`).
    for part, down, _ in latents:
        yield Entry((f"{at}.linear_{part}_down_proj.weight",), (f"{of}.{down}.weight",), split=0, layer=layer)
    for part, _, up in latents:
        norms = (f"{at}.{part}_layernorm.weight", f"{at}.linear_{part}_up_proj.layer_norm_weight")
        yield Entry(norms, (f"{of}.{part}_a_layernorm.weight",), layer=layer)
        yield Entry((f"{at}.linear_{part}_up_proj.weight",), (f"{of}.{up}.weight",), split=0, layer=layer)


def _compressed_attention(kind: str, at: str, of: str, layer: int) -> Iterator[Entry]:
    """Those that SGLang makes one parameter of come one after the other (`joined_with`)."""
    yield Entry((f"{at}.sinks",), (f"{of}.sinks",), split=0, layer=layer)
    plain = [
        ("linear_q_down_proj.weight", "q_a_proj.weight", None),
        ("linear_kv_proj.weight", "kv_proj.weight", None),
        ("q_norm.weight", "q_a_norm.weight", None),
        ("linear_q_up_proj.weight", "q_b_proj.weight", 0),
        ("kv_norm.weight", "kv_norm.weight", None),
        ("linear_o_low.weight", "o_a_proj.weight", 0),
        ("linear_proj.weight", "o_b_proj.weight", 1),
    ]
    if kind != "window":
        plain += _compressor("compressor", "compressor")
    if kind == "sparse":
        plain += _compressor("indexer.compressor", "compressor.indexer")
        plain.append(("indexer.q_proj.weight", "compressor.indexer.q_b_proj.weight", None))
        plain.append(("indexer.scorer.weight", "compressor.indexer.scorer.weights_proj.weight", None))
    for name, source, split in plain:
        yield Entry((f"{at}.{name}",), (f"{of}.{source}",), split=split, layer=layer)


def _compressor(at: str, of: str) -> list[tuple[str, str, int | None]]:
    parts = (
        ("kv_proj.weight", "kv_proj.weight"),
        ("gate_proj.weight", "gate_proj.weight"),
        ("norm.weight", "kv_norm.weight"),
    )
    return [(f"{at}.position_bias", f"{of}.position_bias", None), *((f"{at}.{n}", f"{of}.{s}", None) for n, s in parts)]


def _streams(layer: int) -> Iterator[Entry]:
    for block in ("attn_hc", "ffn_hc"):
        for part in ("fn", "base", "scale"):
            at, of = "decoder.layers.{layer}", f"model.layers.{layer}"
            yield Entry((f"{at}.{block}.{part}",), (f"{of}.{block}.{part}",), layer=layer)


def _dense(layer: int) -> Iterator[Entry]:
    return _gated("decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp", layer)


def _experts(shape: ModelShape, layer: int) -> Iterator[Entry]:
    assert shape.experts is not None, "asked for a sparse layer only"
    called = _names_of_experts(shape)
    at, of = "decoder.layers.{layer}.mlp", f"model.layers.{layer}.{called.block}"
    yield Entry((f"{at}.router.weight",), (f"{of}.gate.weight",), layer=layer)
    if shape.experts.is_hashed(layer):
        yield Entry((f"{at}.router.tid2eid",), (f"{of}.gate.tid2eid",), layer=layer)
    elif shape.experts.has_bias:
        yield Entry((f"{at}.router.expert_bias",), (f"{of}.{called.bias}",), layer=layer)
    for expert in range(shape.experts.number):
        one = f"{of}.experts.{expert}"
        for number, parts in ((1, (called.gate, called.up)), (2, (called.down,))):
            names = (
                f"{at}.experts.local_experts.{{expert}}.linear_fc{number}.weight",
                f"{at}.experts.linear_fc{number}.weight{{expert}}",
            )
            sources = tuple(f"{one}.{part}.weight" for part in parts)
            form: Form = "gated" if number == 1 else "plain"
            yield Entry(names, sources, form, number - 1, layer, expert)
    if shape.experts.shared_width:
        shared = "shared_expert" if shape.experts.has_shared_gate else "shared_experts"
        yield from _gated(f"{at}.shared_experts", f"{of}.{shared}", layer)
    if shape.experts.has_shared_gate:
        yield Entry((f"{at}.shared_experts.gate.weight",), (f"{of}.shared_expert_gate.weight",), layer=layer)


def _stacked_experts(shape: ModelShape, layer: int) -> Iterator[Entry]:
    """Of gpt-oss, in the order in which a checkpoint stacks them: of each of its tensors all experts."""
    assert shape.experts is not None, "asked for a sparse layer only"
    at, of = "decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
    for kind in ("weight", "bias"):
        yield Entry((f"{at}.router.{kind}",), (f"{of}.router.{kind}",), layer=layer)
    parts: tuple[tuple[str, str, Form, int | None], ...] = (
        ("linear_fc1.weight", "gate_up_proj", "woven", 0),
        ("linear_fc1.bias", "gate_up_proj_bias", "woven", 0),
        ("linear_fc2.weight", "down_proj", "turned", 1),
        ("linear_fc2.bias", "down_proj_bias", "plain", None),
    )
    for name, source, form, split in parts:
        for expert in range(shape.experts.number):
            names = f"{at}.experts.local_experts.{{expert}}.{name}", f"{at}.experts.{name}{{expert}}"
            yield Entry(names, (f"{of}.experts.{expert}.{source}",), form, split, layer, expert)


def _gated(at: str, of: str, layer: int) -> Iterator[Entry]:
    gate_up = (f"{of}.gate_proj.weight", f"{of}.up_proj.weight")
    yield Entry((f"{at}.linear_fc1.weight",), gate_up, "gated", 0, layer)
    yield Entry((f"{at}.linear_fc2.weight",), (f"{of}.down_proj.weight",), split=1, layer=layer)


def _norms(shape: ModelShape, layer: int) -> Iterator[Entry]:
    at, of = "decoder.layers.{layer}", f"model.layers.{layer}"
    before = (f"{at}.input_layernorm.weight", f"{at}.self_attention.linear_qkv.layer_norm_weight")
    yield Entry(before, (f"{of}.input_layernorm.weight",), layer=layer)
    between = (f"{at}.pre_mlp_layernorm.weight", f"{at}.mlp.linear_fc1.layer_norm_weight")
    yield Entry(between, (f"{of}.post_attention_layernorm.weight",), layer=layer)


# -- one parameter, whole --------------------------------------------------------------------------


def to_megatron(entry: Entry, sources: Sequence[Tensor], shape: ModelShape, tp: int) -> Tensor:
    """The whole parameter from the checkpoint's tensors.

    Args:
        tp: ranks that share the vocabulary, to whose multiple its rows are padded with zeros.
    """
    if entry.form == "qkv":
        return _interleave(sources, shape)
    if entry.form == "gated_qkv":
        return _interleave(_without_gates(sources, shape), shape)
    if entry.form in ("delta_in", "delta_conv"):
        return _by_key_head(entry, sources, shape)
    if entry.form == "vocab":
        extra = shape.padded_vocab_size(tp) - sources[0].shape[0]
        return torch.nn.functional.pad(sources[0], (0, 0, 0, extra)) if extra else sources[0]
    if entry.form in ("turned", "woven"):
        turned = sources[0].t()  # a vector stays as it is
        return torch.cat([turned[0::2], turned[1::2]]) if entry.form == "woven" else turned
    return torch.cat(list(sources)) if len(sources) > 1 else sources[0]


def from_megatron(entry: Entry, whole: Tensor, shape: ModelShape) -> list[Tensor]:
    """The checkpoint's tensors, in the order of `entry.sources`; views where the layout allows."""
    if entry.form == "qkv":
        return _separate(whole, shape)
    if entry.form == "gated_qkv":
        return _with_gates(whole, shape)
    if entry.form in ("delta_in", "delta_conv"):
        return _of_key_heads(entry, whole, shape)
    if entry.form == "vocab":
        return [whole[: shape.vocab_size]]
    if entry.form in ("turned", "woven"):
        rows = torch.stack(whole.chunk(2), dim=1).flatten(0, 1) if entry.form == "woven" else whole
        return [rows.t()]
    return list(whole.chunk(len(entry.sources)))


def _interleave(qkv: Sequence[Tensor], shape: ModelShape) -> Tensor:
    grouped = [t.reshape(shape.num_kv_heads, -1, *t.shape[1:]) for t in qkv]
    return torch.cat(grouped, dim=1).flatten(0, 1)


def _separate(whole: Tensor, shape: ModelShape) -> list[Tensor]:
    grouped = whole.reshape(shape.num_kv_heads, -1, *whole.shape[1:])
    widths = [shape.num_heads // shape.num_kv_heads * shape.head_dim, shape.head_dim, shape.head_dim]
    return [part.flatten(0, 1) for part in torch.split(grouped, widths, dim=1)]


def _without_gates(qkv: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
    """Queries, gates, keys and values, from a projection that gives each head's query and then its gate."""
    query, *rest = qkv
    paired = query.reshape(shape.num_heads, 2, -1, *query.shape[1:])
    return [paired[:, 0].flatten(0, 1), paired[:, 1].flatten(0, 1), *rest]


def _with_gates(whole: Tensor, shape: ModelShape) -> list[Tensor]:
    grouped = whole.reshape(shape.num_kv_heads, -1, *whole.shape[1:])
    of_queries = shape.num_heads // shape.num_kv_heads * shape.head_dim
    widths = [of_queries, of_queries, shape.head_dim, shape.head_dim]
    query, gate, key, value = (part.flatten(0, 1) for part in torch.split(grouped, widths, dim=1))
    paired = torch.stack([t.reshape(shape.num_heads, -1, *t.shape[1:]) for t in (query, gate)], dim=1)
    return [paired.flatten(0, 2), key, value]


def _by_key_head(entry: Entry, sources: Sequence[Tensor], shape: ModelShape) -> Tensor:
    """Rows of linear attention: of each key head its query, key, values, output gates, and the states' two gates.

    A checkpoint with everything in two projections has them by key head as it is, else all queries come first.
    """
    delta = shape.delta_net
    assert delta is not None, "the model has linear attention"
    parts = list(sources)
    if entry.form == "delta_conv" or not delta.is_fused:
        widths = [delta.key_heads * delta.key_dim] * 2 + [delta.value_heads * delta.value_dim]
        parts = [*torch.split(parts[0], widths), *parts[1:]]
    whole = torch.cat([t.reshape(delta.key_heads, -1, *t.shape[1:]) for t in parts], dim=1).flatten(0, 1)
    return whole[:, 0] if entry.form == "delta_conv" else whole


def _of_key_heads(entry: Entry, whole: Tensor, shape: ModelShape) -> list[Tensor]:
    delta = shape.delta_net
    assert delta is not None, "the model has linear attention"
    shared_by = delta.value_heads // delta.key_heads
    of_values = shared_by * delta.value_dim
    widths = [delta.key_dim, delta.key_dim, of_values]
    if entry.form == "delta_in":
        widths += [of_values, shared_by, shared_by]
    parts = torch.split(whole.reshape(delta.key_heads, -1, *whole.shape[1:]), widths, dim=1)
    if entry.form == "delta_conv":
        return [torch.cat([t.flatten(0, 1) for t in parts])[:, None]]
    if delta.is_fused:
        return [torch.cat(parts[:4], dim=1).flatten(0, 1), torch.cat(parts[4:], dim=1).flatten(0, 1)]
    query, key, value, *rest = (t.flatten(0, 1) for t in parts)
    return [torch.cat([query, key, value]), *rest]


# -- one parameter, shared by ranks ----------------------------------------------------------------


def shard(entry: Entry, whole: Tensor, rank: int, size: int) -> Tensor:
    """The part of a whole parameter that tensor-parallel rank `rank` of `size` holds."""
    if size == 1 or entry.split is None:
        return whole
    if entry.has_halves:
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    return whole.chunk(size, dim=entry.split)[rank]


def unshard(entry: Entry, shards: Sequence[Tensor]) -> Tensor:
    """The whole parameter from the shards of all ranks, in their order."""
    if len(shards) == 1:
        return shards[0]
    assert entry.split is not None, "only a parameter with a dimension to split has several shards"
    if entry.has_halves:
        halves = [s.chunk(2) for s in shards]
        return torch.cat([half[i] for i in (0, 1) for half in halves])
    return torch.cat(list(shards), dim=entry.split)


# -- experts as transformers' modules keep them ----------------------------------------------------

_STACKED = re.compile(r"(.*)\.mlp\.experts\.(gate_up_proj|down_proj)$")
_STACKED_IN_FILES = re.compile(r"(.*\.mlp\.experts)\.(\d+\.)?((?:gate_up|down)_proj(?:_bias)?)$")


def unstack_experts(named: Iterable[tuple[str, Tensor]], shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """Names of a module of transformers 5 → the sources of entries: each expert's matrices by themselves.

    Such are the names of a checkpoint too, but of a family whose checkpoints have experts stacked.
    """
    if shape.experts and shape.experts.is_stacked:
        yield from _unstack(named)
        return
    called = _names_of_experts(shape)
    for name, tensor in named:
        if not (found := _STACKED.match(name)):
            yield name.replace(".mlp.", f".{called.block}."), tensor
            continue
        at, which = found.groups()
        for number, matrix in enumerate(tensor):
            whole = [(called.down, matrix)]
            parts = zip((called.gate, called.up), matrix.chunk(2), strict=True) if which == "gate_up_proj" else whole
            for part, values in parts:
                yield f"{at}.{called.block}.experts.{number}.{part}.weight", values


def stack_experts(named: Iterable[tuple[str, Tensor]], shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """The way back; a layer's experts must come one after the other, in the order of the entries."""
    if shape.experts and shape.experts.is_stacked:
        yield from _stack(named, shape.experts.number)
        return
    called, number = _names_of_experts(shape), shape.experts.number if shape.experts else 0
    single = re.compile(rf"(.*)\.{called.block}\.experts\.(\d+)\.({called.gate}|{called.up}|{called.down})\.weight$")
    waiting: dict[tuple[int, str], Tensor] = {}
    for name, tensor in named:
        if not (found := single.match(name)):
            yield name.replace(f".{called.block}.", ".mlp."), tensor
            continue
        waiting[int(found[2]), found[3]] = tensor
        if len(waiting) == 3 * number:
            gate_up = [torch.cat([waiting[e, called.gate], waiting[e, called.up]]) for e in range(number)]
            yield f"{found[1]}.mlp.experts.gate_up_proj", torch.stack(gate_up)
            yield f"{found[1]}.mlp.experts.down_proj", torch.stack([waiting[e, called.down] for e in range(number)])
            waiting.clear()
    assert not waiting, "every layer's experts are whole"


def as_saved(named: Iterable[tuple[str, Tensor]], shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """The sources of entries, in their order → what a checkpoint of the family has."""
    if shape.compressed:
        yield from ((release_name(name), tensor) for name, tensor in named)
        return
    is_stacked = shape.experts is not None and shape.experts.is_stacked
    yield from stack_experts(named, shape) if is_stacked else named


def _unstack(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in named:
        if not (found := _STACKED_IN_FILES.match(name)):
            yield name, tensor
            continue
        for number, one in enumerate(tensor):
            yield f"{found[1]}.{number}.{found[3]}", one


def _stack(named: Iterable[tuple[str, Tensor]], number: int) -> Iterator[tuple[str, Tensor]]:
    """No more than one stack is held at a time."""
    waiting = iter(named)
    for name, tensor in waiting:
        found = _STACKED_IN_FILES.match(name)
        if not found or found[2] is None:
            yield name, tensor
            continue
        assert found[2] == "0.", f"{name} is the first of its kind"
        whole = torch.empty(number, *tensor.shape, dtype=tensor.dtype, device=tensor.device)
        whole[0] = tensor
        for expert in range(1, number):
            name, tensor = next(waiting)
            assert name == f"{found[1]}.{expert}.{found[3]}", f"{name} is the next of its kind"
            whole[expert] = tensor
        yield f"{found[1]}.{found[3]}", whole


def stored(source: str) -> tuple[str, int | None]:
    """The tensor of a checkpoint that holds a source of an entry, and which expert's part it is; None: all of it."""
    found = _STACKED_IN_FILES.match(source)
    if found is None or found[2] is None:
        return source, None
    return f"{found[1]}.{found[3]}", int(found[2][:-1])


def missing(shape: ModelShape, checkpoint: Mapping[str, object]) -> list[str]:
    """Names the model needs that a checkpoint does not have."""
    needed = dict.fromkeys(stored(source)[0] for entry in entries(shape) for source in entry.sources)
    return [name for name in needed if name not in checkpoint and f"{name}_blocks" not in checkpoint]
