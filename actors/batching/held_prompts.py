"""HeldPrompts: the system prompts kept in the context so that requests which start with one share its KV."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from genbatch.actors.batching.sequence import HeldPrompt
from genbatch.actors.scheduling.llm_request import Phase

# First messages remembered until a second request brings the same one.
MAX_SEEN = 256


class HeldPrompts:
    """Which prompts are held, which were seen once, and who makes room for whom.

    Args:
        slots: the context's sequence ids that are set aside for held prompts.
        min_tokens: shorter prefixes are not worth a slot.
    """

    def __init__(self, slots: Sequence[int], min_tokens: int) -> None:
        self._free_slots = list(slots)
        self._min_tokens = min_tokens
        self._held: list[HeldPrompt] = []
        self._seen: OrderedDict[tuple[bytes, tuple[int, ...]], None] = OrderedDict()

    def __iter__(self) -> Iterator[HeldPrompt]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def find(self, tokens: Sequence[int], key: bytes | None) -> HeldPrompt | None:
        """The longest held prompt that these tokens start with, for this owner or configured for all.

        Args:
            key: whose; None: only configured ones.
        """
        found: HeldPrompt | None = None
        for held in self._held:
            size = len(held.tokens)
            # At least one token stays to be evaluated: its logits give the first token.
            if size >= len(tokens) or (found and size <= len(found.tokens)):
                continue
            if (held.pinned or held.key == key) and tokens[:size] == held.tokens:
                found = held
        return found

    def pinned_prefix(self, tokens: Sequence[int]) -> int:
        """How many positions a prompt shares with a configured one."""
        held = self.find(tokens, None)
        return len(held.tokens) if held is not None else 0

    def notice(self, prefix: Sequence[int], key: bytes) -> bool:
        """Books that a request starts with `prefix`; whether it is now worth holding (the second sighting)."""
        if len(prefix) < self._min_tokens:
            return False
        sighting = (key, tuple(prefix))
        if sighting in self._seen:
            del self._seen[sighting]
            return True
        self._seen[sighting] = None
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        return False

    def take_slot(self) -> int | None:
        """A free slot to fill; None when every one is taken."""
        return self._free_slots.pop() if self._free_slots else None

    def return_slot(self, slot: int) -> None:
        """Gives back what `take_slot` gave, empty again."""
        self._free_slots.append(slot)

    def adopt(self, held: HeldPrompt, slot: int) -> None:
        """Holds a prompt that is evaluated already, in a slot that `take_slot` gave."""
        held.seq_id = slot
        held.num_computed = len(held.tokens)
        held.move(Phase.PREFILLING)
        self._held.append(held)

    def hold(self, held: HeldPrompt) -> bool:
        """Gives a prompt a slot; False when every slot is taken."""
        if not self._free_slots:
            return False
        held.seq_id = self._free_slots.pop()
        held.move(Phase.PREFILLING)
        self._held.append(held)
        return True

    def droppable(self) -> list[HeldPrompt]:
        """Those that may go to make room, the least recently used first: not configured ones, nor unfinished ones."""
        return sorted([held for held in self._held if held.ready and not held.pinned], key=lambda held: held.last_used)

    def least_recent(self, besides: HeldPrompt | None = None) -> HeldPrompt | None:
        """The one to go first."""
        return next((held for held in self.droppable() if held is not besides), None)

    def drop(self, held: HeldPrompt) -> int:
        """Takes a prompt out; returns the slot whose blocks the caller now frees."""
        assert held.seq_id is not None
        self._held.remove(held)
        slot, held.seq_id = held.seq_id, None
        held.move(Phase.FINISHED)
        self._free_slots.append(slot)
        return slot

    def evaluating(self) -> list[HeldPrompt]:
        """Those that still need a forward."""
        return [held for held in self._held if not held.ready]
