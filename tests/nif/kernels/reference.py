"""Plain-torch twins of the kernels: what each must compute, used as test oracles and readable without Triton.

Every function works in float32 (or wider) inside and rounds where its kernel rounds.
"""

import torch


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention over block tables; arguments and result as in `paged_attention.paged_attention`."""
    _, num_heads, head_size = query.shape
    _, num_kv_heads, block_size, _ = key_cache.shape
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    for row, kv_len in enumerate(kv_lens.tolist()):
        begin, end = int(query_starts[row]), int(query_starts[row + 1])
        if begin == end or kv_len == 0:
            continue
        blocks = block_table[row, : -(-kv_len // block_size)].long()
        # [blocks, heads, block_size, head] -> [heads, positions, head], one copy of a KV head per query head
        key, value = (
            cache[blocks].transpose(0, 1).reshape(num_kv_heads, -1, head_size)[:, :kv_len].float()
            for cache in (key_cache, value_cache)
        )
        group = num_heads // num_kv_heads
        key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
        scores = query[begin:end].transpose(0, 1).float() @ key.transpose(1, 2) * scale  # [heads, queries, positions]
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        positions = torch.arange(kv_len, device=query.device)
        distance = positions[kv_len - (end - begin) :, None] - positions[None, :]
        hidden = distance < 0
        if window is not None:
            hidden |= distance >= window
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, end - begin, 1)), dim=-1)
        weights = scores.softmax(-1)[..., :kv_len]
        out[begin:end] = (weights @ value).transpose(0, 1).to(query.dtype)
    return out


def share_ends(length: int, share: int) -> list[int]:
    """Where the shares end that hold the keys of so many positions."""
    ends: list[int] = []
    while not ends or ends[-1] < length:
        ends.append((ends[-1] if ends else 0) + share)
        if len(ends) >= 32 and len(ends) % 16 == 0:
            share *= 2
    return ends


def plan_shares(
    query_starts: torch.Tensor, kv_lens: torch.Tensor, *, max_kv_len: int, share: int, window: int | None = None
) -> tuple[list[int], list[int]]:
    """The owners of all shares, and each entry's first; arguments as in `paged_attention.plan_shares`."""
    owners: list[int] = []
    firsts = [0]
    for entry, kv_len in enumerate(kv_lens.clamp(max=max_kv_len).tolist()):
        if int(query_starts[entry + 1] - query_starts[entry]) == 1:
            oldest = 0 if window is None else max(0, kv_len - window)
            attended = [cut for cut in share_ends(kv_len, share) if cut > oldest]
            owners += [entry] * max(1, len(attended))
        firsts.append(len(owners))
    return owners, firsts


def write_kv(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Arguments as in `rope_cache.write_kv`."""
    block_size = key_cache.shape[2]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            key_cache[slot // block_size, :, slot % block_size] = key[token].to(key_cache.dtype)
            value_cache[slot // block_size, :, slot % block_size] = value[token].to(value_cache.dtype)


def rope_and_write(
    qkv: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    num_heads: int,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Arguments and result as in `rope_cache.rope_and_write`."""
    _, num_kv_heads, _, head_size = key_cache.shape
    heads = qkv.view(len(qkv), -1, head_size)  # [T, heads, head_size]
    query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if query_norm is not None and key_norm is not None:
        query, key = _rms_norm(query, query_norm, eps), _rms_norm(key, key_norm, eps)
    cos, sin = (table[positions][:, None].repeat(1, 1, 2) for table in (cos, sin))
    query, key = (_rotate(part.float(), cos, sin).to(qkv.dtype) for part in (query, key))
    write_kv(key, value, key_cache, value_cache, slots)
    return query


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def add_rms_norm(residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Arguments and result as in `rms_norm.add_rms_norm`."""
    if delta is not None:
        residual.copy_(residual.float() + delta.float())
    return _rms_norm(residual, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Argument and result as in `silu_mul.silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate.float()).to(gate.dtype) * up


def copy_blocks(pool: torch.Tensor, pairs: torch.Tensor) -> None:
    """Arguments as in `block_copy.copy_blocks`."""
    pool[pairs[:, 1]] = pool[pairs[:, 0]]


def next_tokens(given: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Arguments and result as in `next_tokens.next_tokens`."""
    return torch.where(given < 0, drawn[(-1 - given).clamp_min(0)], given).clamp_min(0)


def gather_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Arguments and result as in `logprob.gather_logprobs`."""
    known = (tokens >= 0) & (tokens < logits.shape[1])
    gathered = logits.float().log_softmax(-1).gather(1, tokens.clamp(0, logits.shape[1] - 1))
    return gathered.masked_fill(~known, float("-inf"))
