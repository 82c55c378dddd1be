"""DecodeStep: all that a decode step of the device needs, its draws included."""

from dataclasses import dataclass

import torch

from genbatch.nif.batch import RaggedBatch


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One token of each of several sequences, and how each one's next token is drawn."""

    batch: RaggedBatch  # an input id below 0 stands for the token that the step before drew in the same row
    draws: torch.Tensor  # [R, NUM_PARAMS] float64, see DrawTable
