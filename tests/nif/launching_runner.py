"""A runner that launches steps as a GPU's would, in plain torch: each is computed at once and its tokens kept back."""

import dataclasses
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import torch

from genbatch.nif.models.loaded_model import Model
from genbatch.nif.runner import Launched, RaggedBatch, Rows
from genbatch.nif.runners.torch_runner import TorchRunner
from genbatch.nif.sampling.choice import sample
from genbatch.nif.sampling.sampler import Floats, Sampled, SamplerState, SamplingParams, draw


class LaunchedTokens:
    """A launched step's tokens. Implements `Launched`."""

    def __init__(self, number: int, logits: Floats, tokens: list[int | None], on_wait: Callable[[int], None]) -> None:
        self.number = number
        self.tokens = tokens
        self._logits = logits
        self._on_wait = on_wait

    def redraw(self, rows: Sequence[int], states: Sequence[SamplerState], positions: Sequence[int]) -> SimpleNamespace:
        draws = sample(self._logits[list(rows)], states, positions)
        for row, drawn in zip(rows, draws, strict=True):
            self.tokens[row] = drawn.token_id if isinstance(drawn, Sampled) else None
        return SimpleNamespace(results=lambda: draws)

    def wait(self) -> list[int | None]:
        self._on_wait(self.number)
        return self.tokens


class LaunchingTorchRunner(TorchRunner):
    """Implements `LaunchingRunner`, and notes what was launched and waited for in which order.

    Args:
        model: on the CPU.
    """

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.trace: list[tuple[str, int]] = []
        self.forwards = 0
        self.launches = 0
        self.spoil: Callable[[int, Floats], None] = lambda launch, logits: None  # may change or raise
        self.gate: Callable[[int], None] = lambda launch: None  # holds a wait up, or raises

    def forward(self, batch: RaggedBatch) -> Rows:
        self.forwards += 1
        return super().forward(batch)

    @torch.inference_mode()
    def launch(
        self,
        batch: RaggedBatch,
        draws: npt.NDArray[np.float64],
        after: Launched | None,
        rows: Sequence[int] | None = None,
    ) -> LaunchedTokens:
        self.launches += 1
        self.trace.append(("launch", self.launches))
        if after is not None:
            assert isinstance(after, LaunchedTokens) and after.number == self.launches - 1
            goes_on = range(len(after.tokens)) if rows is None else rows
            batch = dataclasses.replace(batch, input_ids=np.array([after.tokens[row] or 0 for row in goes_on]))
        logits = self.forward(batch)
        assert isinstance(logits, np.ndarray)
        self.spoil(self.launches, logits)
        return LaunchedTokens(self.launches, logits, _draw(logits, draws), self._wait)

    def _wait(self, launch: int) -> None:
        self.gate(launch)
        self.trace.append(("wait", launch))


def _draw(logits: Floats, draws: npt.NDArray[np.float64]) -> list[int | None]:
    tokens: list[int | None] = []
    for row, (temperature, top_k, top_p, min_p, point) in zip(logits, draws.tolist(), strict=True):
        best = row.max()
        if not np.isfinite(best):
            tokens.append(None)
        elif temperature == 0.0:
            tokens.append(int(row.argmax()))
        else:
            params = SamplingParams(seed=0, temperature=temperature, top_k=int(top_k), top_p=top_p, min_p=min_p)
            tokens.append(int(draw(row[None], best[None], [params], [point])[0]))
    return tokens
