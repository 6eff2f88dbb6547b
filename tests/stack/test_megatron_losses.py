"""Log-probabilities from a vocabulary that ranks share, against those from all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from stack_process import logprob_rank, run_ranks
from stack_rig import free_port

from rllaunch.algo.losses import kl_estimate, token_logprobs
from rllaunch.backends.megatron.losses import vocab_parallel_logprobs

pytestmark = pytest.mark.stack

N, V, REAL = 23, 24, 21


def case(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(N, V, generator=generator, dtype=torch.float64) * 4).to(dtype)
    logits[3, 7] = float("-inf")
    rows = torch.randperm(N, generator=generator)[:17]
    tokens = torch.randint(0, REAL, (17,), generator=generator)
    tokens[rows == 3] = 1
    return {
        "logits": logits,
        "rows": rows,
        "tokens": tokens,
        "vocab_size": REAL,
        "weight": torch.randn(17, generator=generator, dtype=torch.float64),
        "entropy_weight": torch.randn(17, generator=generator, dtype=torch.float64),
    }


def expected(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Through `token_logprobs` on whole logits: log-probs, entropies and the gradient."""
    logits = given["logits"].clone().requires_grad_()
    logp, entropy = token_logprobs(logits[given["rows"], :REAL][None], given["tokens"][None], 0.7)
    ((logp[0] * given["weight"]).sum() + (entropy[0] * given["entropy_weight"]).sum()).backward()
    assert logits.grad is not None
    return logp[0].detach(), entropy[0].detach(), logits.grad


@pytest.mark.parametrize("chunk_tokens", [1, 5, 100])
def test_chunk_by_chunk_it_is_the_log_softmax(chunk_tokens: int) -> None:
    given = case()
    logits = given["logits"].clone().requires_grad_()
    logp, entropy = vocab_parallel_logprobs(
        logits, given["rows"], given["tokens"], temperature=0.7, vocab_size=REAL, chunk_tokens=chunk_tokens
    )
    ((logp * given["weight"]).sum() + (entropy * given["entropy_weight"]).sum()).backward()
    for got, want in zip((logp, entropy, logits.grad), expected(given), strict=True):
        torch.testing.assert_close(got, want)


def test_two_ranks_each_with_half_the_vocabulary_agree_with_one(tmp_path: Path) -> None:
    given = case()
    torch.save(given, tmp_path / "given.pt")
    run_ranks(2, logprob_rank, free_port(), str(tmp_path))
    halves = [torch.load(tmp_path / f"logprob-{rank}.pt") for rank in range(2)]
    logp, entropy, grad = expected(given)
    for rank, (got_logp, got_entropy, _) in enumerate(halves):
        torch.testing.assert_close(got_logp, logp, msg=f"rank {rank}")
        torch.testing.assert_close(got_entropy, entropy, msg=f"rank {rank}")
    torch.testing.assert_close(torch.cat([half[2] for half in halves], dim=1), grad)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_gradient_of_a_kl_term_reaches_the_logits(kind: Any) -> None:
    given = case()
    grads = []
    for through in ("ours", "whole"):
        logits = given["logits"].clone().requires_grad_()
        if through == "ours":
            logp, _ = vocab_parallel_logprobs(logits, given["rows"], given["tokens"], vocab_size=REAL, chunk_tokens=4)
        else:
            logp = token_logprobs(logits[given["rows"], :REAL][None], given["tokens"][None])[0][0]
        kl_estimate(kind, logp, logp.detach() + given["weight"]).sum().backward()
        grads.append(logits.grad)
    torch.testing.assert_close(*grads)


def test_narrow_logits_are_read_in_float32_and_their_gradient_stays_narrow() -> None:
    given = case(torch.bfloat16)
    logits = given["logits"].clone().requires_grad_()
    logp, entropy = vocab_parallel_logprobs(logits, given["rows"], given["tokens"], temperature=0.7, vocab_size=REAL)
    assert (logp.dtype, entropy.dtype) == (torch.float32, torch.float32)
    want = token_logprobs(given["logits"][given["rows"], :REAL][None], given["tokens"][None], 0.7)
    torch.testing.assert_close(logp, want[0][0])
    torch.testing.assert_close(entropy, want[1][0])
    (logp.sum() + entropy.sum()).backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_no_tensor_of_all_tokens_and_the_whole_vocabulary_is_made_in_float32() -> None:
    """Of 4,096 tokens and 1,000 columns, 16 MB in float32, the largest tensor made has one chunk of tokens."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        wide = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
                self.wide = max(self.wide, out.numel())
            return out

    logits = torch.randn(4096, 1000).bfloat16().requires_grad_()
    tokens = torch.randint(0, 1000, (4096,))
    with Largest() as seen:
        logp, entropy = vocab_parallel_logprobs(logits, torch.arange(4096), tokens, chunk_tokens=128)
        (logp.sum() + entropy.sum()).backward()
    assert 0 < seen.wide <= 128 * 1000


def test_nothing_asked_for_is_no_error_and_has_a_gradient() -> None:
    logits = torch.randn(3, 4, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    logp, entropy = vocab_parallel_logprobs(logits, none, none)
    (logp.sum() + entropy.sum()).backward()
    assert logp.shape == (0,)
    assert logits.grad is not None
    assert not logits.grad.any()
