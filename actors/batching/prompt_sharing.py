"""PromptSharing: lets requests that begin alike evaluate that beginning once."""

from genbatch.actors.batching.held_prompts import HeldPrompts
from genbatch.actors.batching.intake import Intake
from genbatch.actors.batching.request import Request
from genbatch.actors.batching.sequence import HeldPrompt
from genbatch.actors.batching.slots import Slots


class PromptSharing:
    """Decides what is held, and which requests share it.

    Args:
        intake: renders configured messages, and makes held prompts.
        held: what is held.
        slots: frees what is held no longer.
    """

    def __init__(self, intake: Intake, held: HeldPrompts, slots: Slots) -> None:
        self._intake = intake
        self._held = held
        self._slots = slots

    def hold_configured(self, content: str) -> HeldPrompt:
        """Takes a slot, if there is one, for a system message that stays; its tokens are still to be evaluated."""
        held = self._intake.held_prompt(self._intake.system_prompt(content), b"")
        held.pinned = True
        self._held.hold(held)
        return held

    def share(self, request: Request, *, context_is_free: bool) -> None:
        """Lets the request share a held prompt; holds its first message when another request had the same."""
        first = request.sequences[0]
        if first.scores_prompt:
            return
        held = self._held.find(request.prompt_tokens, first.cache_key)
        if held is None:
            prefix = request.first_message
            # A template may do something new with a conversation; at least one token stays to be evaluated.
            shares = len(prefix) < len(request.prompt_tokens) and request.prompt_tokens[: len(prefix)] == prefix
            if shares and self._held.notice(prefix, first.cache_key):
                held = self._hold(prefix, first.cache_key, context_is_free)
        if held is not None:
            first.donor = held
            first.num_shared = len(held.tokens)

    def _hold(self, prefix: list[int], key: bytes, context_is_free: bool) -> HeldPrompt | None:
        held = self._intake.held_prompt(prefix, key)
        if self._held.hold(held):
            return held
        oldest = self._held.least_recent()
        if oldest is None or not context_is_free:
            return None
        self._slots.drop_held(oldest)
        self._held.hold(held)
        return held
