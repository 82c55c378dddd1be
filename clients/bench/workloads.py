"""Workloads: reproducible scripted requests and their arrival times.

Prompts are token ids and lengths are scripted, so that every engine does the same work. Lengths depend only on the
seed. Prompts depend on seed, salt and the load's name. So a load never hits the prefix cache after another load, or
after the same load with another salt. Arrivals are in vLLM's terms: a rate and a burstiness.
A Case is one load at one rate.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum


def arrival_times(count: int, rate: float, *, burstiness: float = 1.0, seed: int) -> list[float]:
    """Draw the arrival times of `count` requests in seconds from the start, ascending.

    The gaps are drawn from a gamma distribution with shape `burstiness`: 1 is a Poisson process, less is burstier,
    more is more even. The gaps are scaled so that every load takes count / rate seconds.

    Args:
        rate: requests per second; infinite sends all at once.
        burstiness: above 0.
    """
    if math.isinf(rate):
        return [0.0] * count
    draw = random.Random(f"arrivals {seed}")
    times, now = [], 0.0
    for _ in range(count):
        now += draw.gammavariate(burstiness, 1.0)
        times.append(now)
    return [time * count / rate / now for time in times]


# Smaller ids are often special tokens.
FIRST_TOKEN = 32
DEFAULT_SEED = 20260101


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request with an answer of a fixed length.

    Args:
        prompt: token ids.
        max_tokens: the exact number of tokens of the answer.
        after_tokens: start the request once every other request has so many tokens; 0 starts it with the load.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    after_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ScriptedLoad:
    """The requests of one load.

    Args:
        name: the load's unique name.
        requests: the requests in the order of their arrival.
    """

    name: str
    requests: tuple[LoadRequest, ...]

    @property
    def max_positions(self) -> int:
        """Return the number of positions of the longest request."""
        return max(len(request.prompt) + request.max_tokens for request in self.requests)

    def positions_of(self, count: int) -> int:
        """Return the positions of the `count` longest requests together: a KV pool in which no request waits."""
        return sum(sorted(len(request.prompt) + request.max_tokens for request in self.requests)[-count:])


class Prompts:
    """Draws token ids.

    Args:
        vocab_size: token ids are below it.
        key: the seed of the draws.
    """

    def __init__(self, vocab_size: int, key: str) -> None:
        self._draw = random.Random(key)
        self._range = range(min(FIRST_TOKEN, vocab_size - 1), vocab_size)

    def tokens(self, length: int) -> tuple[int, ...]:
        """Draw the next `length` token ids."""
        return tuple(self._draw.choices(self._range, k=length))


def lognormal_lengths(draw: random.Random, median: float, sigma: float, cap: int) -> Iterator[int]:
    """Yield lengths from 1 to `cap`, without end."""
    while True:
        yield max(1, min(cap, round(median * draw.lognormvariate(0.0, sigma))))


# W2: lengths of chats as median, sigma of the logarithm, and cap, in tokens.
CHAT_INPUT = (150, 1.0, 1024)
CHAT_OUTPUT = (180, 0.8, 512)
CHAT_REQUESTS = 64
# W3
SYSTEM_PROMPT_TOKENS = 512
# W4: shares of a service's capacity, the requests per second that it answers when all arrive at once.
POISSON_LOADS = (0.3, 0.6, 0.9)
# W5
FIXED_BATCHES = (1, 8, 16, 32)
FIXED_CONTEXTS = (128, 1024)
FIXED_OUTPUT = 64
# Prompt tokens that a service prefills in a step, by default. While the last prompts are prefilled the first requests
# decode already, so answers are longer by a token for each such step.
PREFILL_STEP = 512
# W6: requests that decode, and a prompt that then arrives. With its answer it fits a model of 8,192 positions.
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
    """The options of all workloads.

    Args:
        vocab_size: the model's vocabulary size.
        seed: the seed of lengths and arrivals, and with the salt of the tokens.
        salt: changes only the tokens.
        num_prompts: number of requests of W2, W3 and W4.
        scale: multiplies every length; 1 is the defined workload, and less suits a smaller model.
    """

    vocab_size: int
    seed: int = DEFAULT_SEED
    salt: int = 0
    num_prompts: int = CHAT_REQUESTS
    scale: float = 1.0

    def prompts(self, name: str) -> Prompts:
        """Return the source of tokens for the load of this name."""
        return Prompts(self.vocab_size, f"{name} {self.seed} {self.salt}")

    def scaled(self, length: int) -> int:
        """Return `length` times the scale, at least 1."""
        return max(1, round(length * self.scale))


def chat(options: LoadOptions, name: str = "W2 chat") -> ScriptedLoad:
    """Make W2, also the requests of W4: prompts and answers have lognormal lengths."""
    lengths = _chat_lengths(options)
    prompts = options.prompts(name)
    return ScriptedLoad(name, tuple(LoadRequest(prompts.tokens(prompt), answer) for prompt, answer in lengths))


def shared_prompt(options: LoadOptions, *, sharing: bool = True) -> ScriptedLoad:
    """Make W3: W2 with 512 more tokens before every prompt.

    Args:
        sharing: whether all requests have the same 512 tokens. Otherwise each request has its own, so that nothing can
            be shared and the work without sharing is the same.
    """
    length = options.scaled(SYSTEM_PROMPT_TOKENS)
    name = f"W3 {length} tokens {'shared by all' if sharing else 'of its own each'}"
    prompts = options.prompts(name)
    system = prompts.tokens(length)
    requests = []
    for prompt, answer in _chat_lengths(options):
        front = system if sharing else prompts.tokens(length)
        requests.append(LoadRequest(front + prompts.tokens(prompt), answer))
    return ScriptedLoad(name, tuple(requests))


def fixed_batch(
    options: LoadOptions, batch: int, context: int, *, output: int = FIXED_OUTPUT, shared_prefix: int = 0
) -> ScriptedLoad:
    """Make W5: `batch` prompts of `context` tokens at once.

    Args:
        output: least number of steps in which all requests decode.
        shared_prefix: number of equal tokens at the start of every prompt.
    """
    length = options.scaled(context)
    name = f"W5 B={batch} context {length}" + (f" after a shared {shared_prefix}" if shared_prefix else "")
    prompts = options.prompts(name)
    prefix = prompts.tokens(shared_prefix)
    answer = options.scaled(output) + -(-batch * length // PREFILL_STEP)
    return ScriptedLoad(name, tuple(LoadRequest(prefix + prompts.tokens(length), answer) for _ in range(batch)))


def long_prefill(options: LoadOptions) -> ScriptedLoad:
    """Make W6: the last request has a long prompt and arrives while all others decode."""
    length = options.scaled(LONG_PROMPT)
    name = f"W6 a prefill of {length} in mid decode"
    prompts = options.prompts(name)
    context, answer = options.scaled(DECODING_CONTEXT), options.scaled(DECODING_OUTPUT)
    decoding = tuple(LoadRequest(prompts.tokens(context), answer) for _ in range(DECODING_REQUESTS))
    after = options.scaled(LONG_AFTER)
    arriving = LoadRequest(prompts.tokens(length), options.scaled(LONG_OUTPUT), after_tokens=after)
    return ScriptedLoad(name, (*decoding, arriving))


def _chat_lengths(options: LoadOptions) -> Sequence[tuple[int, int]]:
    """Draw prompt and answer lengths; a longer list begins with the same lengths."""
    inputs = lognormal_lengths(random.Random(f"inputs {options.seed}"), *CHAT_INPUT)
    outputs = lognormal_lengths(random.Random(f"outputs {options.seed}"), *CHAT_OUTPUT)
    return [(options.scaled(next(inputs)), options.scaled(next(outputs))) for _ in range(options.num_prompts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One load at one rate, with its own summary.

    Args:
        request_rate: requests per second; infinite sends all at once.
        batch, context: W5's numbers; None for other workloads.
        floor_s: seconds of W5's step in the kernels alone, if known.
    """

    load: ScriptedLoad
    request_rate: float = math.inf
    batch: int | None = None
    context: int | None = None
    floor_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseOptions:
    """The options of single workloads.

    Args:
        request_rate: requests per second of W2 and W3.
        sharing: whether W3's requests share their first tokens.
        batches, contexts: W5's numbers; every pair is a case.
        loads: W4's shares of the capacity.
    """

    request_rate: float = math.inf
    sharing: bool = True
    batches: Sequence[int] = FIXED_BATCHES
    contexts: Sequence[int] = FIXED_CONTEXTS
    loads: Sequence[float] = POISSON_LOADS


def cases_of(workload: Workload, load: LoadOptions, options: CaseOptions, capacity: float = math.inf) -> list[Case]:
    """Return the cases of a workload, in the order of their runs.

    Args:
        capacity: the requests per second that W4's loads are shares of.
    """
    match workload:
        case Workload.W2:
            return [Case(load=chat(load), request_rate=options.request_rate)]
        case Workload.W3:
            return [Case(load=shared_prompt(load, sharing=options.sharing), request_rate=options.request_rate)]
        case Workload.W4:
            return [
                Case(load=chat(load, f"W4 chat at {share:g} of capacity"), request_rate=share * capacity)
                for share in options.loads
            ]
        case Workload.W5:
            return [
                Case(load=fixed_batch(load, batch, context), batch=batch, context=context)
                for context in options.contexts
                for batch in options.batches
            ]
        case Workload.W6:
            return [Case(load=long_prefill(load))]
