"""Decoding with and without drafts: on tasks that copy from their prompt, on chat, and with a JSON schema.

    python tests/benchmarks/prompt_lookup.py --quantize none --sequences 1 2 4 8 --rounds 5

One Batcher drafts nothing. The other looks prompts up, and drafts what a schema forces. Both are over one loaded model
and take turns, A-B-B-A, with the same requests; answers are compared token by token. A ratio is the time without drafts
divided by the time with drafts, of each round's pair. A line has the median and the extremes. `draft_model.py` measures
a draft model in the same way.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeAlias

import trio

from genbatch.actors.batcher.batcher import Batcher
from genbatch.actors.batcher.messages import Generate
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.batcher.parts import context_factory
from genbatch.actors.runtime.actor import ActorRef, start
from genbatch.nif.context.engine import Engine, load_engine
from genbatch.nif.engine_options import EngineOptions
from genbatch.proto.messages import GenerateRequest, Message, ResponseFormat, Result

TEXT = (
    "The lighthouse keeper counted the ships each evening. On Monday there were seven, and on Tuesday only three,"
    " because a storm had come from the north. He wrote every name into a heavy green book: Aurora, Swift, Marigold,"
    " Old Thomas, the Lady Grey. When the lamp was lit he read the names aloud, so that none would be forgotten."
)
CODE = (
    "def total(prices, rate):\n    result = 0\n    for price in prices:\n        result = result + price\n"
    "    tax = result * rate\n    return result + taxes\n\n\ndef mean(values):\n    if not values:\n"
    "        return 0\n    count = 0\n    result = 0\n    for value in values:\n        result = result + value\n"
    "        count = count + 1\n"
    "    return result / count\n"
)
COPYING = (
    f"Repeat the following text exactly, word by word:\n\n{TEXT}",
    f"Fix the misspelled name in this Python code and write out all of the code:\n\n```python\n{CODE}```",
    f"Write this text again without any change:\n\n{TEXT[117:]}",
    f"Copy this code:\n\n```python\n{CODE[:180]}```",
)
CHAT = (
    "What should I think of when I plan a garden on a balcony?",
    "Explain in a few sentences why the sky is blue.",
    "Write a short story about a fox who learns to swim.",
    "Give me advice for my first job interview.",
)
JSON = (
    "Describe a person as JSON.",
    "Invent a customer of a shoe shop, as JSON.",
    "Describe a teacher as JSON.",
    "Describe your neighbour as JSON.",
)
TASKS = {"copying": COPYING, "chat": CHAT, "json": JSON}
SCHEMA = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "family_name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 18, "maximum": 99},
        "is_registered": {"type": "boolean"},
        "favourite_colour": {"enum": ["red", "green", "blue"]},
    },
    "required": ["first_name", "family_name", "age", "is_registered", "favourite_colour"],
    "additionalProperties": False,
}


Question: TypeAlias = str | list[int]  # a user's message, or a prompt's tokens


async def timed(ref: ActorRef, questions: Sequence[Question], **fields: object) -> tuple[float, float, list[list[int]]]:
    """Return the seconds from the first token to the last, the CPU seconds from the call, and the answers."""
    answers: list[list[int]] = [[] for _ in questions]
    first = [0.0] * len(questions)

    async def ask(index: int, question: Question) -> None:
        def on_token(token: object) -> None:
            first[index] = first[index] or time.perf_counter()

        if isinstance(question, str):
            asked = {"messages": [Message(role="user", content=question)]}
        else:
            asked = {"token_ids": question}
        wanted = GenerateRequest(**asked, **fields)  # type: ignore[arg-type]
        result = await ref.call(Generate(wanted, on_token), timeout=None)
        assert isinstance(result, Result)
        answers[index] = result.token_ids

    cpu = time.process_time()
    async with trio.open_nursery() as nursery:
        for index, question in enumerate(questions):
            nursery.start_soon(ask, index, question)
    return time.perf_counter() - min(first), time.process_time() - cpu, answers


@dataclass
class Turns:
    """The measurements of some rounds.

    Args:
        ratios, of_cpu: the time and the CPU time without drafts, divided by those with drafts; one a round.
        rates: tokens per second without drafts.
        drafted, accepted: drafted tokens, and those that were right.
    """

    ratios: list[float] = field(default_factory=list)
    of_cpu: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0

    def __str__(self) -> str:
        return (
            f"x{median(self.ratios):.2f} ({min(self.ratios):.2f} to {max(self.ratios):.2f}), "
            f"of CPU time x{median(self.of_cpu):.2f}, {median(self.rates):.1f} tok/s without; "
            f"{self.accepted} of {self.drafted} drafted tokens were right"
        )


async def open_batcher(nursery: trio.Nursery, engine: Engine, *, drafts: bool, prompt_lookup: bool = False) -> Batcher:
    """Start a Batcher over a loaded model."""
    options = BatcherOptions(n_parallel=8, batch_timeout=20.0, batch_size=0, prompt_lookup=prompt_lookup)
    batcher = Batcher(context_factory(engine, options), options)
    await start(nursery, batcher)
    if not drafts:  # no option turns off what a grammar forces
        batcher.stepper._drafts_of = lambda batch: None  # type: ignore[method-assign]
    return batcher


async def take_turns(
    pair: dict[bool, Batcher], questions: Sequence[Question], size: int, rounds: int, **fields: object
) -> Turns:
    """Measure `size` requests at once without and with drafts, round by round; the first round warms up.

    Args:
        pair: the Batchers without and with drafts.
        questions: each round takes others of them.
    """
    turns, stats = Turns(), pair[True].stats
    before = stats.drafted_tokens, stats.accepted_draft_tokens
    for number in range(rounds + 1):
        asked = [questions[(number + index) % len(questions)] for index in range(size)]
        took = {}
        for drafts in (False, True) if number % 2 else (True, False):
            took[drafts] = await timed(pair[drafts].ref, asked, **fields)
        (without, cpu_without, expected), (with_drafts, cpu_with, answers) = took[False], took[True]
        assert answers == expected, "an answer has changed"
        if number:
            turns.ratios.append(without / with_drafts)
            turns.of_cpu.append(cpu_without / cpu_with)
            turns.rates.append(sum(map(len, answers)) / without)
    turns.drafted, turns.accepted = stats.drafted_tokens - before[0], stats.accepted_draft_tokens - before[1]
    return turns


async def measure(chosen: argparse.Namespace) -> None:
    """Print a line for each task and size."""
    engine = load_engine(EngineOptions(model_path=chosen.model, quantize=chosen.quantize))
    async with trio.open_nursery() as nursery:
        pair = {
            drafts: await open_batcher(nursery, engine, drafts=drafts, prompt_lookup=drafts) for drafts in (False, True)
        }
        for name in chosen.tasks:
            fields: dict[str, object] = {
                "max_tokens": chosen.tokens,
                "temperature": chosen.temperature,
                "frequency_penalty": chosen.frequency_penalty,
                "seed": 7,
            }
            if name == "json":
                fields["response_format"] = ResponseFormat(type="json_schema", schema=SCHEMA)
            for size in chosen.sequences:
                turns = await take_turns(pair, TASKS[name], size, chosen.rounds, **fields)
                print(f"{name:8} B={size}: {turns}", flush=True)
        for batcher in pair.values():
            await batcher.ref.stop()


def main() -> None:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=120, help="most tokens of an answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--frequency-penalty", type=float, default=0.0)
    trio.run(measure, parser.parse_args())


if __name__ == "__main__":
    main()
