"""Log-probabilities of tokens under the model's own distribution, before any penalty or truncation."""

from dataclasses import dataclass

import torch

from genbatch.nif.sampling.ranked_candidates import pad_to_chunks, ranked

# Logits scored at once: a prompt's chunk may have a hundred times as many, and each is copied more than once.
SCORED_AT_ONCE = 1 << 20


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
    rows_at_once = max(1, SCORED_AT_ONCE // logits.shape[1])
    parts = zip(torch.split(logits, rows_at_once), torch.split(token_ids, rows_at_once), strict=True)
    return [score for rows, ids in parts for score in _scores(rows, ids, top)]


def _scores(logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> list[TokenScore]:
    log_probs = torch.log_softmax(logits, dim=-1)
    chosen = log_probs.gather(1, token_ids[:, None])[:, 0].tolist()
    if not top:
        return [TokenScore(logprob, ()) for logprob in chosen]
    values, ids = ranked(pad_to_chunks(log_probs), top)
    rows = zip(chosen, ids.tolist(), values.tolist(), strict=True)
    return [TokenScore(logprob, tuple(zip(i, v, strict=True))) for logprob, i, v in rows]
