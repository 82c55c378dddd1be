"""SimRequest: a request drawn by seed, and the answers that it has alone and without faults."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from genbatch.actors.batcher.generation import Output, OutputRules
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.sampling.choice import sample
from genbatch.nif.sampling.sampler import Sampled, SamplerState, SamplingParams
from genbatch.proto.messages import Choice, GenerateRequest, Message, TokenLogprob
from tests.simulation.history_runner import (
    BEGIN,
    DIE,
    FIRST_PLAIN,
    LARGEST,
    NAN,
    RAISE,
    VOCAB,
    hash_with,
    likeliest,
    logits_after,
)

HARMS = (NAN, RAISE, DIE)
# First messages, which the Batcher holds for those that have the same; no word has a token that does harm.
SYSTEM_MESSAGES = ("be brief", "sing it")
WORDS = ("one", "two", "three", "four")
# The tokens that do harm are never drawn by chance.
HARMLESS = dict.fromkeys(HARMS, -100.0)


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A request and what comes of it.

    Args:
        wanted: as it is sent.
        prompt: its tokens.
        answers: one a choice; of a prompt that does harm there is none.
        does_harm: whether its prompt, or the first token of its answer, is one of HARMS: then nothing follows that.
    """

    wanted: GenerateRequest
    prompt: list[int]
    answers: tuple[Choice, ...]
    does_harm: bool

    def check_prompt_logprobs(self, scored: Sequence[TokenLogprob | None], *, is_whole: bool) -> None:
        """Whether every position of the prompt was evaluated after those before it.

        Args:
            is_whole: whether all of it was.
        """
        norm = math.log(math.exp(LARGEST) + VOCAB - 1)
        value = BEGIN
        should: list[float | None] = []
        for token in self.prompt:
            should.append((LARGEST if token == likeliest(value) else 0.0) - norm if should else None)
            value = hash_with(value, token)
        assert len(scored) == len(should) or (not is_whole and len(scored) < len(should))
        for token, one, logprob in zip(self.prompt, scored, should, strict=False):
            if one is None or logprob is None:
                assert one is logprob, (scored, should)
            else:
                assert one.token_id == token and abs(one.logprob - logprob) < 1e-4, (one, logprob)


def draw_request(
    rng: random.Random,
    model: Model,
    prefixes: list[list[int]],
    *,
    max_tokens: int,
    harm: float,
    has_priorities: bool,
) -> SimRequest:
    """Draws a request.

    Args:
        prefixes: beginnings that prompts have in common.
        harm: how likely it does harm.
        has_priorities: whether it may name one.
    """
    given, prompt = _draw_prompt(rng, model, prefixes)
    fields = {
        "max_tokens": max_tokens,
        "seed": rng.randrange(4),
        "ignore_eos": True,
        "deadline_s": rng.choice((None, None, None, 0.2, 5.0)),
        "tenant": rng.choice(("", "", "", "a", "b")),
        "priority": rng.randint(-2, 2) if has_priorities else 0,
    }
    if rng.random() < harm:
        token = rng.choice(HARMS)
        if rng.random() < 0.5:  # in the answer: its step is a decode
            wanted = GenerateRequest(**given, **fields, logit_bias={token: 100.0})
            first = _alone(model, prompt, GenerateRequest(**given, **fields | {"max_tokens": 1}), 0, (token,))
            return SimRequest(wanted, prompt, (first,), True)
        prompt = [*prompt]
        prompt[rng.randrange(len(prompt))] = token
        return SimRequest(GenerateRequest(token_ids=prompt, **fields), prompt, (), True)
    if rng.random() < 0.2:
        fields |= {"temperature": 5.0, "logit_bias": HARMLESS, "top_k": rng.choice((0, 0, 0, 20))}
    if rng.random() < 0.05:
        fields |= {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "logit_bias": HARMLESS}
    if rng.random() < 0.05:
        fields |= {"logprobs": rng.choice((0, 3))}
    if rng.random() < 0.1:
        fields |= {"prompt_logprobs": 0}
    if rng.random() < 0.1:
        fields |= {"echo": True}
    fields |= {"n": rng.choice((1, 1, 1, 1, 2, 3))}
    wanted = GenerateRequest(**given, **fields)
    answer = _alone(model, prompt, wanted, 0)
    if rng.random() < 0.3:
        wanted = GenerateRequest(**given, **fields | _draw_stop(rng, answer))
        answer = _alone(model, prompt, wanted, 0)
    # Each choice has its own draws.
    draws = bool(wanted.temperature)
    others = [_alone(model, prompt, wanted, choice) if draws else answer for choice in range(1, wanted.n)]
    return SimRequest(wanted, prompt, (answer, *others), False)


def _draw_prompt(rng: random.Random, model: Model, prefixes: list[list[int]]) -> tuple[dict[str, object], list[int]]:
    """A prompt as it is sent, and its tokens."""
    kind = rng.random()
    if kind < 0.8:
        shared = prefixes[rng.randrange(len(prefixes))][: rng.randint(0, 24)]
        prompt = shared + [rng.randrange(FIRST_PLAIN, VOCAB) for _ in range(rng.randint(1, 12))]
        return {"token_ids": prompt}, prompt
    words = " ".join(rng.choices(WORDS, k=rng.randint(1, 3)))
    if kind < 0.9:
        return {"prompt": words}, model.tokenizer.encode(words)
    turns = [("system", rng.choice(SYSTEM_MESSAGES)), ("user", words)]
    prompt = model.tokenizer.apply_chat_template([{"role": role, "content": content} for role, content in turns])
    return {"messages": [Message(role=role, content=content) for role, content in turns]}, prompt


def _draw_stop(rng: random.Random, answer: Choice) -> dict[str, object]:
    """What ends an answer like this one before its time."""
    if answer.text and rng.random() < 0.5:
        start = rng.randrange(len(answer.text))
        return {"stop": [answer.text[start : start + rng.randint(1, 3)]]}
    fewest = rng.choice((0, 0, rng.randint(0, len(answer.token_ids))))
    return {"stop_token_ids": [rng.choice(answer.token_ids)], "min_tokens": fewest}


def _alone(
    model: Model, prompt: Sequence[int], wanted: GenerateRequest, choice: int, forced: Sequence[int] = ()
) -> Choice:
    """What a choice of a request is when nothing else is there; `forced` are its first tokens."""
    stop_ids = frozenset(wanted.stop_token_ids)
    rules = OutputRules(
        stop=wanted.stop,
        stop_ids=stop_ids,
        max_tokens=wanted.max_tokens or 0,
        echo=_echo(model, prompt, wanted),
        wants_logprobs=wanted.logprobs is not None,
    )
    output = Output(model.tokenizer.backend, prompt, rules)
    params = SamplingParams(
        temperature=wanted.temperature or 0.0,
        top_k=wanted.top_k or 0,
        repetition_penalty=wanted.repetition_penalty or 1.0,
        frequency_penalty=wanted.frequency_penalty,
        logit_bias=wanted.logit_bias,
        seed=(wanted.seed or 0) + choice,
        logprobs=wanted.logprobs,
        min_tokens=wanted.min_tokens,
        suppress=stop_ids,
    )
    state = SamplerState(params, prompt)
    value = BEGIN
    for token in prompt:
        value = hash_with(value, token)
    while output.finish_reason is None:
        drawn = Sampled(likeliest(value))
        index = len(output.token_ids)
        if index < len(forced):
            drawn = Sampled(forced[index])
        elif state.reads_logits:
            [one] = sample(logits_after([value]), [state], [len(prompt) + index])
            assert isinstance(one, Sampled)
            drawn = one
        state.accept(drawn.token_id)
        output.push(drawn)
        value = hash_with(value, drawn.token_id)
    return output.choice(output.finish_reason)


def _echo(model: Model, prompt: Sequence[int], wanted: GenerateRequest) -> str:
    if not wanted.echo:
        return ""
    return wanted.prompt if wanted.prompt is not None else model.tokenizer.decode(prompt)
