"""KVView: what schedulers may ask of the KV memory, answered from the context's bookkeeping."""

from collections.abc import Callable, Iterable

from genbatch.actors.batching.held_prompts import HeldPrompts
from genbatch.actors.batching.sequence import Sequence, Slotted
from genbatch.actors.scheduling.blocks import Blocks
from genbatch.actors.scheduling.llm_request import LlmRequest, Phase
from genbatch.actors.scheduling.step_plan import StepLimits
from genbatch.nif.kv.kv_cache import KVCache
from genbatch.nif.kv.step_draft import Beginning


class KVView:
    """The `kv_cache_manager` of schedulers; implements KVResources.

    Args:
        kv: the bookkeeping.
        held: prompts that take blocks for no request's sake alone.
        limits: the budgets of a step.
    """

    def __init__(self, kv: KVCache, held: HeldPrompts, limits: StepLimits) -> None:
        self._kv = kv
        self._held = held
        self._limits = limits
        self._beginnings: dict[int, Beginning] = {}  # by request id, of those that may start
        self._idle: list[int] = []  # slots of held prompts that can go
        self._nothing = Blocks([0] * len(kv.groups))
        self._all = Blocks(kv.num_blocks)

    def prepare(self, waiting: Iterable[Slotted], beginning_of: Callable[[Slotted], Beginning]) -> None:
        """Before each plan: what the waiting ones would start with, and which held prompts nobody waits for."""
        self._beginnings = {}
        wanted: set[int] = set()
        for slotted in waiting:
            beginning = self._beginnings[slotted.request_id] = beginning_of(slotted)
            slotted.num_computed = beginning.length
            if isinstance(slotted.donor, Slotted):
                wanted.add(slotted.donor.request_id)
        idle = [held.seq_id for held in self._held.droppable() if held.request_id not in wanted]
        self._idle = [seq_id for seq_id in idle if seq_id is not None]

    @property
    def block_size(self) -> int:
        """Positions in a block."""
        return self._kv.block_size

    @property
    def num_blocks(self) -> Blocks:
        """All blocks."""
        return self._all

    @property
    def no_blocks(self) -> Blocks:
        """None of any pool; needs of nothing are this very object."""
        return self._nothing

    @property
    def free_blocks(self) -> Blocks:
        """Blocks that can be handed out now, if held prompts that nobody waits for give way."""
        free = Blocks(self._kv.free_blocks)
        return free + Blocks(self._kv.held_only_by(self._idle)) if self._idle else free

    def get_max_resource_count(self) -> Blocks:
        """Blocks that requests may hold in all: those of configured prompts are never given back."""
        pinned = [held.seq_id for held in self._held if held.pinned and held.seq_id is not None]
        available = self._all
        for seq_id in pinned:
            available = available - Blocks(self._kv.blocks_held(seq_id))
        return available

    def get_needed_resource_to_completion(self, request: LlmRequest) -> Blocks:
        """The most blocks the request holds on its way to its full length."""
        available = self.get_max_resource_count()
        alone = self._to_completion(request, 1)
        if alone > available:
            return alone
        # What has room alone must not be told otherwise: then it runs alone, in smaller steps and sharing nothing.
        return (self._to_completion(request, self._limits.max_batch_tokens) + _copies(request)).at_most(available)

    def blocks_held(self, request: LlmRequest) -> Blocks:
        """Blocks that become free if this request alone is released."""
        slots = _slots(request)
        return Blocks(self._kv.held_only_by(slots)) if slots else self._nothing

    def blocks_for_step(self, request: LlmRequest, num_tokens: int) -> Blocks:
        """The most blocks to take until `num_tokens` more tokens of the request are computed."""
        kv, length = self._kv, request.num_computed + num_tokens
        chunk = min(num_tokens, self._limits.max_batch_tokens)
        slots = _slots(request)
        if not slots:
            beginning = self._beginnings.get(request.request_id, Beginning(0, self._nothing.counts))
            return Blocks(kv.still_to_take_from(beginning, length, chunk))
        if all(kv.is_writable(seq_id, length) for seq_id in slots):
            return self._nothing
        needed = self._nothing
        for seq_id in slots:
            needed = needed + Blocks(kv.still_to_take(seq_id, length, chunk))
        return needed

    def longest(self, prompt_tokens: list[int], width: int, cap: int, *, shares: bool) -> int:
        """The most tokens, prompt and output together, with which a sequence fits if it is alone; 0 if none do.

        Args:
            width: see LlmRequest.
            cap: most that are asked for, at least 1.
            shares: whether it may take over a configured prompt that it begins with.
        """
        available = self.get_max_resource_count()
        pinned = self._held.pinned_prefix(prompt_tokens) if shares else 0
        num_prompt = len(prompt_tokens)
        # The most positions whose blocks are there, by bisection: they grow with each.
        fits, too_many = 0, cap
        if self._limits.cache_budget is not None:
            too_many = min(cap, self._limits.cache_budget // width * self._kv.block_size + 1)
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self._most(num_prompt, middle, width, pinned, 1) <= available:
                fits = middle
            else:
                too_many = middle
        return fits + 1 if fits else 0  # the token drawn last is never evaluated

    def _to_completion(self, request: LlmRequest, chunk: int) -> Blocks:
        num_prompt, pinned = request.num_prompt_tokens, _num_pinned(request)
        return self._most(num_prompt, request.max_positions, request.width, pinned, chunk)

    def _most(self, num_prompt: int, num_positions: int, width: int, num_pinned: int, chunk: int) -> Blocks:
        """The most blocks held on the way to `num_positions`, besides those of a configured prompt."""
        kv = self._kv
        most = kv.most_held(num_positions, chunk)
        of_beam = kv.most_held(num_positions) if width > 1 else most
        needed = []
        for group, count, beam in zip(kv.groups, most, of_beam, strict=True):
            if width > 1:
                # Beams share the prompt's whole blocks. Those that share a last block each take a copy before the
                # original goes: one more for every two.
                common = min(num_prompt // kv.block_size, beam) if group.window is None else 0
                count = max(count, common + (beam - common) * width + width // 2)
            shared = num_pinned // kv.block_size if group.window is None else 0
            needed.append(max(0, count - shared))
        return Blocks(needed)


def _slots(request: LlmRequest) -> list[int]:
    """The slots that hold KV of the request."""
    assert isinstance(request, Slotted)
    if request.seq_id is None:
        return []
    return [request.seq_id, *request.beam_slots] if request.phase is Phase.DECODING else [request.seq_id]


def _num_pinned(request: LlmRequest) -> int:
    """Positions that it shares with a configured prompt for as long as it lives."""
    held = request.held_donor if isinstance(request, Slotted) else None
    return len(held.tokens) if held is not None and held.pinned else 0


def _copies(request: LlmRequest) -> int:
    """The block that a choice and the one whose prompt it shares both copy, while the original is still there."""
    return int(isinstance(request, Sequence) and isinstance(request.donor, Sequence))
