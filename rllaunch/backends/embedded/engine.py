"""The embedded rollout engine: samples from a `transformers` model, with a KV cache allocated beforehand if it can."""

# B rows, P prompt tokens (left-padded), L response tokens, V vocabulary

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rllaunch.backends.base import Bucket, GenerateRequest, GenerateResult, LaunchContext, MemoryReading, Slot
from rllaunch.backends.embedded.cache import FlatCache, attends_by_token, cache_layout, layer_shapes
from rllaunch.backends.embedded.decoding import CachedDecoder, Decoder, WholeDecoder
from rllaunch.backends.embedded.host_copies import HostCopies, make_host_copies
from rllaunch.backends.embedded.layout import Layout, checksum, lay_out, move_parameters, view_of
from rllaunch.backends.embedded.model import build_model, engine_dtype, special_ids
from rllaunch.backends.embedded.pool import FlatBuffer, open_pools
from rllaunch.backends.embedded.shared_file import SharedFile
from rllaunch.backends.embedded.sizes import arena_bytes, padded_bytes, read_memory
from rllaunch.backends.node_memory import recorded_pss
from rllaunch.errors import RunError
from rllaunch.plan.handoff import ENGINE_REGIONS, Region

if TYPE_CHECKING:
    from rllaunch.backends.base import FloatArray, IntArray


class EmbeddedEngine:
    """One engine of a slot. See `rllaunch.backends.base.RolloutEngine` for the promises."""

    def __init__(self, context: LaunchContext, slot: Slot) -> None:
        torch.set_num_threads(context.config.run.torch_num_threads)
        self.context = context
        self.slot = slot
        self.version: int | None = None
        self._owner = f"engine-{slot.index}"
        self._updating: int | None = None
        self._missing: set[str] = set()
        self._bucket_file: SharedFile | None = None
        rollout = context.config.rollout
        self.max_rows = math.ceil(context.config.num_samples / context.num_slots)
        self.response_len = rollout.rollout_max_response_len
        self.total_len = context.max_prompt_tokens + self.response_len
        dtype = engine_dtype(context)
        meta = build_model(context, dtype=dtype, device="meta", with_lora=context.config.sends_adapters)
        self._layouts: dict[Region, Layout] = {
            "weights": lay_out([("engine", meta.named_parameters())]),
            "kv_cache": cache_layout(layer_shapes(meta), self.max_rows, self.total_len, dtype),
            "cuda_graph": _workspace_layout(self.max_rows, self.total_len, self.response_len),
        }
        # What a full update sends, or with LoRA only the adapters: exactly these names must come.
        self._sent = {n for n, p in meta.named_parameters() if p.requires_grad}
        self._sizes = padded_bytes(context, {r: layout.nbytes for r, layout in self._layouts.items()})
        self._device_pool, self._host_pool = open_pools(context, slot)
        device = slot.device
        self._buffers = {
            r: FlatBuffer(self._device_pool, self._owner, r, nbytes, device) for r, nbytes in self._sizes.items()
        }
        self._copies = self._host_copies()

    def region_bytes(self) -> Mapping[Region, int]:
        return self._sizes

    def start(self) -> None:
        for buffer in self._buffers.values():
            buffer.allocate()
        dtype, with_lora = engine_dtype(self.context), self.context.config.sends_adapters
        self.model = build_model(self.context, dtype=dtype, with_lora=with_lora)
        move_parameters(dict(self.model.named_parameters()), self._layouts["weights"], self._buffers["weights"])
        self.model.requires_grad_(False)
        self.model.to(self.slot.device)
        self._weights = self._layouts["weights"].views(self._buffers["weights"])
        self._workspace = self._layouts["cuda_graph"].views(self._buffers["cuda_graph"])
        self._decoder = self._make_decoder()
        self.pad_id, self._eos_ids = special_ids(self.model)

    def _make_decoder(self) -> Decoder:
        if not attends_by_token(self.model):
            return WholeDecoder(self.model)
        cache = FlatCache(self._layouts["kv_cache"], self._buffers["kv_cache"])
        return CachedDecoder(self.model, cache, self._workspace["attended"])

    # -- handoff -----------------------------------------------------------------------------------

    def release_memory_occupation(self, tags: Sequence[Region]) -> None:
        for region in self._known(tags):
            buffer = self._buffers[region]
            if region == "weights" and self._copies is not None:
                self._copies.store(region, buffer.bytes)
            buffer.free()

    def resume_memory_occupation(self, tags: Sequence[Region]) -> None:
        for region in self._known(tags):
            buffer = self._buffers[region]
            buffer.allocate()
            if region != "weights":
                continue
            if self._copies is not None:
                self._copies.restore(region, buffer.bytes)
            else:
                # The content is gone, and its version with it, so `generate` refuses until the update. NaN shows
                # wherever else the weights would be used.
                self.version = None
                for tensor in self._weights.values():
                    tensor.fill_(math.nan)

    def _known(self, tags: Sequence[Region]) -> Sequence[Region]:
        for region in tags:
            if region not in ENGINE_REGIONS:
                raise RunError(f"{self._owner} has no region {region!r}", "", f"regions: {', '.join(ENGINE_REGIONS)}")
        return tags

    def _host_copies(self) -> HostCopies | None:
        options = self.context.options
        if not options.has_mirror:
            return None
        sizes: dict[Region, int] = {"weights": self._sizes["weights"]}
        return make_host_copies(
            options, self.slot, self._host_pool, self._owner, sizes, lambda: arena_bytes(self.context)
        )

    # -- weights -----------------------------------------------------------------------------------

    def begin_weight_update(self, version: int) -> None:
        if self._updating is not None:
            raise RunError(f"{self._owner}: an update to version {self._updating} is under way already")
        self._require("weights")
        self._updating = version
        self._missing = set(self._sent)

    def load_bucket(self, bucket: Bucket) -> None:
        if self._updating is None:
            raise RunError(f"{self._owner}: a bucket arrived outside a weight update")
        content = self._bucket_bytes(bucket)
        for piece in bucket.tensors:
            target = self._weights.get(piece.name)
            if target is None or tuple(target.shape) != piece.shape:
                has = "has no such tensor" if target is None else f"holds {list(target.shape)}"
                raise RunError(f"{self._owner} {has}: the update brings {piece.name} {list(piece.shape)}")
            target.copy_(view_of(content, piece))
            self._missing.discard(piece.name)

    def end_weight_update(self, version: int) -> None:
        if self._updating != version:
            raise RunError(f"{self._owner}: the update to {self._updating} was ended as one to {version}")
        if self._missing:
            some = ", ".join(sorted(self._missing)[:3])
            raise RunError(
                f"{self._owner}: the update to version {version} lacks {len(self._missing)} tensors: {some}, …"
            )
        self._updating = None
        self.version = version

    def _bucket_bytes(self, bucket: Bucket) -> Tensor:
        assert isinstance(bucket.handle, str), "on the embedded backend a bucket is a shared file"
        file = self._bucket_file
        if file is None or str(file.path) != bucket.handle or file.nbytes < bucket.nbytes:
            file = self._bucket_file = SharedFile(bucket.handle)
        return file.bytes[: bucket.nbytes]

    def weights_checksum(self) -> str:
        self._require("weights")
        return checksum(self._weights.items())

    # -- sampling ----------------------------------------------------------------------------------

    @torch.no_grad()
    def generate(self, request: GenerateRequest) -> GenerateResult:
        """
        Raises:
            RunError: something is offloaded, an update is under way, or the weights are of another version.
        """
        self._require(*ENGINE_REGIONS)
        if self._updating is not None:
            raise RunError(f"{self._owner}: generate during the update to version {self._updating}")
        if request.version != self.version:
            raise RunError(
                f"{self._owner} holds weights of version {self.version}, version {request.version} is asked for",
                "",
                "the weight update before this step did not reach the engine",
            )
        parts = []
        # Prompts of one length together: less padding, and fewer passes where a model takes none. Stable, so that the
        # samples of a prompt stay neighbours.
        order_B = np.argsort(request.prompt_lens_B, kind="stable")
        for begin in range(0, len(order_B), self.max_rows):
            rows = order_B[begin : begin + self.max_rows]
            uniform = None if request.uniform_BL is None else request.uniform_BL[rows]
            parts.append(self._generate(request.prompt_ids_BP[rows], request.prompt_lens_B[rows], uniform))
        ids, logprobs, masks = zip(*parts, strict=True)
        back_B = np.argsort(order_B)
        return GenerateResult(*(np.concatenate(each)[back_B] for each in (ids, logprobs, masks)))

    def _generate(
        self, prompt_ids_BP: IntArray, prompt_lens_B: IntArray, uniform_BL: FloatArray | None
    ) -> tuple[IntArray, FloatArray, FloatArray]:
        B, L = len(prompt_ids_BP), self.response_len
        work = self._workspace
        device = self.slot.device
        ids_BL, logp_BL, mask_BL = work["ids"][:B], work["logprobs"][:B], work["mask"][:B]
        ids_BL.fill_(self.pad_id)
        logp_BL.zero_()
        mask_BL.zero_()
        if uniform_BL is not None:
            work["uniform"][:B].copy_(torch.from_numpy(np.ascontiguousarray(uniform_BL)))
        prompts = torch.from_numpy(prompt_ids_BP), torch.from_numpy(prompt_lens_B)
        self._decoder.start(*(t.to(device) for t in prompts))
        temperature = self.context.config.rollout.rollout_temperature
        alive_B = torch.ones(B, dtype=torch.bool, device=device)
        eos = torch.tensor(sorted(self._eos_ids), dtype=torch.long, device=device)
        for t in range(L):
            logits_BV = self._decoder.next_logits(ids_BL[:, :t])
            if uniform_BL is None:
                logp_BV = torch.log_softmax(logits_BV, -1)
                token_B = logits_BV.argmax(-1)
            else:
                logp_BV = torch.log_softmax(logits_BV / temperature, -1)
                # In float64: over a large vocabulary the rounding of a float32 sum outweighs its rare tokens.
                cdf_BV = logp_BV.double().exp().cumsum(-1)
                # The last token with mass takes what rounding leaves above the sum.
                point_B1 = work["uniform"][:B, t : t + 1] * cdf_BV[:, -1:]
                token_B = torch.searchsorted(cdf_BV, point_B1, right=True).squeeze(1).clamp(max=cdf_BV.shape[1] - 1)
            ids_BL[:, t] = torch.where(alive_B, token_B, self.pad_id)
            logp_BL[:, t] = torch.where(alive_B, logp_BV.gather(1, token_B[:, None]).squeeze(1), 0.0)
            mask_BL[:, t] = alive_B.float()
            alive_B = alive_B & ~torch.isin(token_B, eos)
            if t + 1 == L or not bool(alive_B.any()):
                break
        # Copies first: torch never again resizes a storage that numpy has seen, and this one must be freed.
        ids, logprobs, masks = (t.to("cpu", copy=True).numpy() for t in (ids_BL, logp_BL, mask_BL))
        return ids, logprobs, masks

    def _require(self, *regions: Region) -> None:
        for region in regions:
            if not self._buffers[region].is_resident:
                raise RunError(f"{self._owner}: {region} is used while it is offloaded", "", "onload it first")

    def check_health(self) -> bool:
        """Whether it could answer now; checks pause while anything is released."""
        return all(buffer.is_resident for buffer in self._buffers.values())

    def memory(self) -> MemoryReading:
        pss = recorded_pss(self.context.config, [os.getpid()])
        moved_bytes = self._copies.take_moved() if self._copies is not None else 0
        return replace(read_memory(self._device_pool, self._host_pool, moved_bytes), pss_bytes=pss)

    def shutdown(self) -> None:
        if self._copies is not None:
            self._copies.shutdown()
        for buffer in self._buffers.values():
            if buffer.is_resident:
                buffer.free()


def _workspace_layout(num_rows: int, total_len: int, response_len: int) -> Layout:
    """The static buffers of decoding: what a captured graph would read from and write to."""

    def tensor(width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_rows, width, dtype=dtype, device="meta")

    named = [
        ("ids", tensor(response_len, torch.int64)),
        ("attended", tensor(total_len, torch.int64)),
        ("logprobs", tensor(response_len, torch.float32)),
        ("mask", tensor(response_len, torch.float32)),
        ("uniform", tensor(response_len, torch.float32)),
    ]
    return lay_out([("workspace", named)])
