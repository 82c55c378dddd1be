"""PromptSharing: the beginnings of prompts that are held, and the requests that take them over unevaluated.

What is held is configured, or is a first message that came a second time; HeldPrompts knows where each is.
"""

from genbatch.actors.batcher.intake import Intake
from genbatch.actors.batcher.requests import HeldPrompt, Request
from genbatch.actors.batcher.slots import HeldPrompts, Slots


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
        held = self._held.find(request.prompt_tokens, first.cache_key, first.adapter)
        if held is None:
            prefix = request.first_message
            # A template may do something new with a conversation; at least one token stays to be evaluated.
            shares = len(prefix) < len(request.prompt_tokens) and request.prompt_tokens[: len(prefix)] == prefix
            if shares and self._held.notice(prefix, first.cache_key):
                held = self._hold(self._intake.held_prompt(prefix, first.cache_key, first.adapter), context_is_free)
        if held is not None:
            first.donor = held
            first.num_shared = len(held.tokens)

    def _hold(self, held: HeldPrompt, context_is_free: bool) -> HeldPrompt | None:
        if self._held.hold(held):
            return held
        oldest = self._held.least_recent()
        if oldest is None or not context_is_free:
            return None
        self._slots.drop_held(oldest)
        self._held.hold(held)
        return held
