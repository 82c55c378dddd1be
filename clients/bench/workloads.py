"""The workloads W2 to W6, each made anew from its seeds."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from genbatch.clients.bench.load import DEFAULT_SEED, Load, LoadRequest, Prompts, lognormal_lengths

# W2: what chats look like; median, sigma of the logarithm and cap, in tokens.
CHAT_INPUT = (150, 1.0, 1024)
CHAT_OUTPUT = (180, 0.8, 512)
CHAT_REQUESTS = 64
# W3
SYSTEM_PROMPT_TOKENS = 512
# W4: shares of the requests a second that a service answers when all come at once.
POISSON_LOADS = (0.3, 0.6, 0.9)
# W5
FIXED_BATCHES = (1, 8, 16, 32)
FIXED_CONTEXTS = (128, 1024)
FIXED_OUTPUT = 64
# Prompt tokens that a service prefills in a step, by default. While the last prompts are prefilled the first requests
# decode already, so answers are longer by a token for each such step.
PREFILL_STEP = 512
# W6: requests in mid decode, and the prompt that then arrives. With its answer it fits a model of 8,192 positions.
DECODING_REQUESTS, DECODING_CONTEXT, DECODING_OUTPUT = 8, 128, 128
LONG_PROMPT, LONG_OUTPUT, LONG_AFTER = 8000, 16, 32


class Workload(StrEnum):
    """The workloads by name."""

    W2 = "w2"
    W3 = "w3"
    W4 = "w4"
    W5 = "w5"
    W6 = "w6"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What all workloads depend on.

    Args:
        vocab_size: the model's.
        seed: decides lengths and arrivals, and with the salt the tokens.
        salt: another one changes the tokens and nothing else.
        num_prompts: requests of W2, W3 and W4.
        scale: multiplies every length; 1 is the workload as it is defined, less fits a smaller model.
    """

    vocab_size: int
    seed: int = DEFAULT_SEED
    salt: int = 0
    num_prompts: int = CHAT_REQUESTS
    scale: float = 1.0

    def prompts(self, name: str) -> Prompts:
        """Where the tokens of the load of this name come from."""
        return Prompts(self.vocab_size, f"{name} {self.seed} {self.salt}")

    def scaled(self, length: int) -> int:
        """`length` times the scale, at least 1."""
        return max(1, round(length * self.scale))


def chat(options: LoadOptions, name: str = "W2 chat") -> Load:
    """W2, and the requests of W4: lengths of prompts and answers are lognormal."""
    lengths = _chat_lengths(options)
    prompts = options.prompts(name)
    return Load(name, tuple(LoadRequest(prompts.tokens(prompt), answer) for prompt, answer in lengths))


def shared_prompt(options: LoadOptions, *, sharing: bool = True) -> Load:
    """W3: W2 with 512 tokens in front of every prompt.

    Args:
        sharing: whether these are the same for all; else each request has its own, so that nothing can be shared and
            the work of a service that does not share is the same.
    """
    length = options.scaled(SYSTEM_PROMPT_TOKENS)
    name = f"W3 {length} tokens {'shared by all' if sharing else 'of its own each'}"
    prompts = options.prompts(name)
    system = prompts.tokens(length)
    requests = []
    for prompt, answer in _chat_lengths(options):
        front = system if sharing else prompts.tokens(length)
        requests.append(LoadRequest(front + prompts.tokens(prompt), answer))
    return Load(name, tuple(requests))


def fixed_batch(
    options: LoadOptions, batch: int, context: int, *, output: int = FIXED_OUTPUT, shared_prefix: int = 0
) -> Load:
    """W5: `batch` prompts of `context` tokens at once.

    Args:
        output: steps in which all of them decode, at least.
        shared_prefix: tokens in front of every prompt, the same for all.
    """
    length = options.scaled(context)
    name = f"W5 B={batch} context {length}" + (f" after a shared {shared_prefix}" if shared_prefix else "")
    prompts = options.prompts(name)
    prefix = prompts.tokens(shared_prefix)
    answer = options.scaled(output) + -(-batch * length // PREFILL_STEP)
    return Load(name, tuple(LoadRequest(prefix + prompts.tokens(length), answer) for _ in range(batch)))


def long_prefill(options: LoadOptions) -> Load:
    """W6: the last request brings a long prompt once all others are in mid decode."""
    length = options.scaled(LONG_PROMPT)
    name = f"W6 a prefill of {length} in mid decode"
    prompts = options.prompts(name)
    context, answer = options.scaled(DECODING_CONTEXT), options.scaled(DECODING_OUTPUT)
    decoding = tuple(LoadRequest(prompts.tokens(context), answer) for _ in range(DECODING_REQUESTS))
    after = options.scaled(LONG_AFTER)
    arriving = LoadRequest(prompts.tokens(length), options.scaled(LONG_OUTPUT), after_tokens=after)
    return Load(name, (*decoding, arriving))


def _chat_lengths(options: LoadOptions) -> Sequence[tuple[int, int]]:
    """Prompt and answer lengths; more requests begin with the same ones."""
    inputs = lognormal_lengths(random.Random(f"inputs {options.seed}"), *CHAT_INPUT)
    outputs = lognormal_lengths(random.Random(f"outputs {options.seed}"), *CHAT_OUTPUT)
    return [(options.scaled(next(inputs)), options.scaled(next(outputs))) for _ in range(options.num_prompts)]
