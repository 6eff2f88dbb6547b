"""How samples lie in micro-batches: packed in one row or padded, over data-parallel and context-parallel ranks."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core")

from rig import QWEN3, make_batch
from test_megatron_trainer import PADDED, launch, started

from rllaunch.backends.base import TrainBatch
from rllaunch.backends.megatron.batch import MicroBatch, Work, make_work, micro_batches, take
from rllaunch.backends.megatron.dealing import Share
from rllaunch.backends.megatron.trainer import MegatronTrainer

pytestmark = pytest.mark.stack
__all__ = ["started"]  # a fixture

BY_TOKENS = {"micro_batch_size": None, "max_tokens_per_gpu": 30}


def uneven(context: Any, rollout_id: int = 0) -> TrainBatch:
    """A rollout in which one response has all its tokens, and every other one or two."""
    batch = make_batch(context, rollout_id)
    mask_BL = np.zeros_like(batch.mask_BL)
    mask_BL[:, 0] = 1
    mask_BL[::2, 1] = 1
    mask_BL[3] = 1
    response_BL = np.where(mask_BL > 0, np.maximum(batch.response_ids_BL, 3), 0)
    return replace(batch, mask_BL=mask_BL, response_ids_BL=response_BL, logprob_BL=batch.logprob_BL * mask_BL)


def launch_of(response_len: int = 24, **trainer: Any) -> Any:
    return launch(architecture=QWEN3, trainer=trainer, rollout={"rollout_max_response_len": response_len})


def asked_of(batch: TrainBatch, row: int) -> list[int]:
    """The tokens of a sample that a model reads to predict its response."""
    prompt = batch.prompt_ids_BP[row][len(batch.prompt_ids_BP[row]) - batch.prompt_lens_B[row] :]
    return [*prompt, *batch.response_ids_BL[row][batch.mask_BL[row] > 0]][:-1]


def micros_of(context: Any, batch: TrainBatch, rows: torch.Tensor, share: Share) -> tuple[Work, list[MicroBatch]]:
    work = make_work(batch, context.config, "cpu", share)
    return work, [take(work, part) for part in micro_batches(work, rows, context.config)]


def test_rows_are_moved_to_their_first_column_and_padded_behind() -> None:
    context = launch_of(4)
    batch = make_batch(context)
    rows = torch.tensor([5, 1, 2])
    for rank in range(2):
        share = Share(is_packed=False, data_rank=rank, data_size=2, sequence_size=4)
        work, (micro,) = micros_of(context, batch, rows, share)
        assert micro.ids.shape == (2, work.width)
        assert work.width % 4 == 0
        assert micro.mask_bL.any(dim=1).tolist() == [True, rank == 0]
    _, (micro,) = micros_of(context, batch, torch.tensor([5]), Share(is_packed=False))
    wanted, response = asked_of(batch, 5), batch.response_ids_BL[5][batch.mask_BL[5] > 0].tolist()
    assert micro.ids[0, : len(wanted)].tolist() == wanted
    assert micro.token_M.tolist() == response
    assert micro.row_M.tolist() == [batch.prompt_lens_B[5] - 1 + t for t in range(len(response))]


def test_packed_samples_stand_one_after_the_other_and_fill_up_with_one_more() -> None:
    context = launch_of(micro_batch_size=8)
    batch = uneven(context)
    _, (micro,) = micros_of(context, batch, torch.tensor([3, 0, 6]), Share(sequence_size=8))
    wanted = [asked_of(batch, row) for row in (3, 0, 6)]
    bounds = np.cumsum([0, *map(len, wanted)])
    total = -(-bounds[-1] // 8) * 8
    assert micro.ids.shape == micro.position.shape == (1, total)
    assert micro.packed.cu_seqlens_q.tolist() == [*bounds, *([total] if total > bounds[-1] else [])]
    for begin, end, ids in zip(bounds, bounds[1:], wanted, strict=False):
        assert micro.ids[0, begin:end].tolist() == ids
        assert micro.position[0, begin:end].tolist() == list(range(len(ids)))
    assert micro.packed.max_seqlen_q == max(map(len, wanted))
    # Every predicted token stands behind the one that predicts it.
    following = torch.cat([torch.tensor([*ids[1:], -1]) for ids in wanted])
    last = {int(end) - 1 for end in bounds[1:]}
    assert all(
        int(following[row]) == token
        for row, token in zip(micro.row_M.tolist(), micro.token_M.tolist(), strict=True)
        if row not in last
    )
    assert len(micro.row_M) == batch.mask_BL[[3, 0, 6]].sum()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2])
def test_packed_rows_hold_as_many_tokens_as_they_may_and_as_many_on_every_rank(size: int, stages: int) -> None:
    context = launch_of(**BY_TOKENS)
    batch = uneven(context)
    rows = torch.tensor([7, 3, 0, 1, 2, 6, 4, 5])
    lens = [len(asked_of(batch, row)) for row in range(8)]
    limit = 30
    assert sum(lens) > limit
    seen: list[int] = []
    shapes = []
    for rank in range(size):
        share = Share(data_rank=rank, data_size=size, num_stages=stages)
        _, micros = micros_of(context, batch, rows, share)
        shapes.append([m.ids.shape[1] for m in micros])
        seen += [row for m in micros for row in m.rows_b[m.mask_bL.any(1)].tolist()]
        assert all(len(m.rows_b) == 1 or m.ids.shape[1] <= limit for m in micros)
    assert sorted(seen) == list(range(8))
    assert all(s == shapes[0] for s in shapes)
    assert stages == 1 or len(set(shapes[0])) == 1
    assert len(shapes[0]) == -(-sum(lens) // (limit * size))


@pytest.mark.parametrize(("shortest", "longest"), [(1030, 1500), (690, 900)])
def test_samples_that_hardly_fit_together_are_dealt_in_no_time(shortest: int, longest: int) -> None:
    """Tried one micro-batch more at a time they took 13 seconds, on every rank in every pass."""
    context = launch_of(micro_batch_size=None, max_tokens_per_gpu=2048)
    share, rows = Share(data_size=8), torch.arange(8192)
    work = make_work(uneven(context), context.config, "cpu", share)
    lens_B = torch.randint(shortest, longest + 1, (8192,), generator=torch.Generator().manual_seed(0))
    work = replace(work, num_tokens_B=lens_B)
    begun = time.process_time()
    parts = micro_batches(work, rows, context.config)
    assert time.process_time() - begun < 3
    per_row = 2048 // longest
    assert len(parts) == 8192 // 8 // per_row
    assert {len(part.rows_b) for part in parts} == {per_row}
    assert all(int(lens_B[part.rows_b].sum()) <= part.num_positions <= 2048 for part in parts)
    assert micro_batches(work, rows, context.config) is parts, "the next pass over them need not ask again"


def test_a_sample_beyond_the_limit_is_one_by_itself() -> None:
    context = launch_of(micro_batch_size=None, max_tokens_per_gpu=9)
    batch = uneven(context)
    _, micros = micros_of(context, batch, torch.arange(8), Share())
    assert [m.rows_b.tolist() for m in micros if m.ids.shape[1] > 9] == [[3]]
    assert max(len(m.rows_b) for m in micros) > 1


def test_a_rank_without_a_sample_passes_a_row_that_nobody_reads() -> None:
    context = launch_of(micro_batch_size=8)
    batch = uneven(context)
    micros = [micros_of(context, batch, torch.tensor([3, 0]), Share(data_rank=r, data_size=3))[1] for r in range(3)]
    assert [[m.ids.shape for m in rank] for rank in micros] == [[(1, len(asked_of(batch, 3)))]] * 3
    assert [rank[0].mask_bL.any().item() for rank in micros] == [True, True, False]
    assert [len(rank[0].row_M) for rank in micros] == [24, 2, 0]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("is_packed", [True, False])
def test_ranks_that_share_samples_have_chunks_of_each_from_both_ends(is_packed: bool, size: int) -> None:
    context = launch_of(micro_batch_size=8)
    batch, rows = uneven(context), torch.tensor([3, 0, 6])
    ((_, [whole]),) = [micros_of(context, batch, rows, Share(is_packed))]
    predicted = {}
    for rank in range(size):
        share = Share(is_packed, context_rank=rank, context_size=size)
        _, (micro,) = micros_of(context, batch, rows, share)
        lens = np.diff(micro.packed.cu_seqlens_q).tolist() if is_packed else [micro.ids.shape[1] * size] * len(rows)
        each = torch.split(micro.position.flatten(), [n // size for n in lens])
        for length, position in zip(lens, each, strict=True):
            chunk = length // (2 * size)
            early, late = rank * chunk, (2 * size - 1 - rank) * chunk
            assert position.tolist() == [*range(early, early + chunk), *range(late, late + chunk)]
        begins = torch.repeat_interleave(torch.arange(len(each)), torch.tensor([len(e) for e in each]))
        for row, token in zip(micro.row_M.tolist(), micro.token_M.tolist(), strict=True):
            sample = int(begins[row])
            predicted[sample, int(micro.position.flatten()[row])] = (int(micro.ids.flatten()[row]), token)
    assert len(predicted) == len(whole.token_M)
    for number, row in enumerate(rows.tolist()):
        ids, response = asked_of(batch, row), batch.response_ids_BL[row][batch.mask_BL[row] > 0]
        for t, token in enumerate(response):
            at = int(batch.prompt_lens_B[row]) - 1 + t
            assert predicted[number, at] == (ids[at], token)


@pytest.mark.parametrize("is_packed", [True, False])
def test_micro_batches_ask_nothing_of_the_device(is_packed: bool) -> None:
    """On torch's device without storage there is nothing to ask: what must read a value there fails."""
    context = launch_of(micro_batch_size=8)
    batch, rows, share = uneven(context), torch.tensor([3, 0, 6]), Share(is_packed, context_rank=1, context_size=2)
    _, (here,) = micros_of(context, batch, rows, share)
    work = make_work(batch, context.config, "meta", share)
    (micro,) = [take(work, part) for part in micro_batches(work, rows, context.config)]
    values_M = torch.zeros(len(micro.row_M), device="meta", requires_grad=True)
    per_response_bL = replace(micro, context_group=None).per_response(values_M)
    per_response_bL.sum().backward()
    assert per_response_bL.shape == micro.mask_bL.shape == here.mask_bL.shape
    for name in ("ids", "position", "place_M", "row_M", "token_M", "rows_b"):
        assert getattr(micro, name).is_meta
        assert getattr(micro, name).shape == getattr(here, name).shape


def test_values_stand_where_their_tokens_do_and_their_gradients_go_back() -> None:
    context = launch_of(micro_batch_size=8)
    batch = uneven(context)
    work, (micro,) = micros_of(context, batch, torch.tensor([3, 0, 6]), Share())
    values_M = torch.arange(1.0, len(micro.row_M) + 1).requires_grad_()
    found_bL = micro.per_response(values_M)
    want_bL = torch.zeros_like(found_bL)
    want_bL[work.mask_BL[micro.rows_b] > 0] = values_M.detach()
    assert torch.equal(found_bL, want_bL)
    (found_bL * found_bL.detach()).sum().backward()
    assert values_M.grad is not None
    assert torch.equal(values_M.grad, values_M.detach())


def tokens_read(trainer: Any) -> list[int]:
    """Fills with the positions of every forward pass of the policy."""
    counts: list[int] = []
    trainer.built.ddp.register_forward_pre_hook(lambda module, args: counts.append(args[0].numel()))
    return counts


@pytest.mark.parametrize("preset", ["kl", "ppo"])
def test_packed_rows_of_uneven_samples_are_shorter_and_train_the_same(preset: str, started: Any) -> None:
    results = []
    for megatron in ({}, PADDED):
        context = launch(
            preset, architecture=QWEN3, trainer=BY_TOKENS, megatron=megatron, rollout={"rollout_max_response_len": 24}
        )
        trainer = started(MegatronTrainer, context)
        counts = tokens_read(trainer)
        figures = [dict(trainer.train(uneven(context, i)).values) for i in range(2)]
        models = enumerate(trainer.built.models)
        weights = {f"{i} {n}": p.data.clone() for i, model in models for n, p in model.module.named_parameters()}
        results.append((figures, weights, sum(counts)))
    (packed, weights, few), (padded, same, many) = results
    assert few < 0.5 * many
    for got, want in zip(packed, padded, strict=True):
        assert got == {name: pytest.approx(value, rel=1e-4, abs=1e-5) for name, value in want.items()}
    for name, tensor in same.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
