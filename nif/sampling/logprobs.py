"""Log-probabilities of tokens under the model's own distribution, before any penalty or truncation."""

from dataclasses import dataclass

import torch

from genbatch.nif.sampling.ranked_candidates import pad_to_chunks, ranked


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token's log-probability and the likeliest alternatives at its place.

    Args:
        logprob: log_softmax of the raw logits at the token.
        top: (token id, log-probability), most likely first, lower ids first among equals.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> list[TokenScore]:
    """Scores each row's token; serves generated tokens and prompt tokens alike.

    Args:
        logits: [T, V] float32, raw; row t predicts token_ids[t].
        token_ids: [T] int64 on the logits' device, below V.
        top: alternatives to report per row, 0 <= top <= V.
    """
    log_probs = torch.log_softmax(logits, dim=-1)
    chosen = log_probs.gather(1, token_ids[:, None])[:, 0].tolist()
    if not top:
        return [TokenScore(logprob, ()) for logprob in chosen]
    values, ids = ranked(pad_to_chunks(log_probs), top)
    rows = zip(chosen, ids.tolist(), values.tolist(), strict=True)
    return [TokenScore(logprob, tuple(zip(i, v, strict=True))) for logprob, i, v in rows]
