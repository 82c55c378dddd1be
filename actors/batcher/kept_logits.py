"""Keep: the logits that a caller asks to keep."""

import torch


class Keep:
    """The caller makes this object, the Batcher fills it, and it is complete when the call is answered.

    Keeping the prompt's logits evaluates the whole prompt: no part of the prompt then comes from a cache.

    Args:
        context: whether to keep the logits after every token of the prompt.
        generation: whether to keep the logits that every generated token was chosen from.
    """

    def __init__(self, *, context: bool = False, generation: bool = False) -> None:
        self.context = context
        self.generation = generation
        self._context: dict[int, torch.Tensor] = {}  # by position
        self._generation: dict[int, list[torch.Tensor]] = {}  # by choice or beam

    def add_context(self, first: int, rows: torch.Tensor) -> None:
        """Book the logits [n, vocab_size] after positions first, first + 1, …; a repeat replaces them."""
        self._context.update(enumerate(rows, first))

    def add_generation(self, choice: int, row: torch.Tensor) -> None:
        """Book the logits [vocab_size] that the choice's next token was chosen from."""
        self._generation.setdefault(choice, []).append(row)

    def set_generation(self, choice: int, rows: list[torch.Tensor]) -> None:
        """Book all of a beam's rows at once, since a beam's rank is known only at the end."""
        self._generation[choice] = rows

    def context_logits(self) -> torch.Tensor | None:
        """Return [num_prompt_tokens, vocab_size] float32 on the CPU; None if nothing was kept."""
        return torch.stack([self._context[position] for position in sorted(self._context)]) if self._context else None

    def generation_logits(self, choice: int = 0) -> torch.Tensor | None:
        """Return [num_generated, vocab_size] float32 on the CPU; None if nothing was kept."""
        rows = self._generation.get(choice)
        return torch.stack(rows) if rows else None

    def last_generation_row(self) -> torch.Tensor | None:
        """Return the newest row of the first choice, [vocab_size]; None if nothing was kept."""
        rows = self._generation.get(0)
        return rows[-1] if rows else None
