"""Decoding with and without prompt lookup: on tasks that copy from their prompt, and on chat.

    python tests/benchmarks/prompt_lookup.py --quantize none --sequences 1 2 4 --rounds 5

Two Batchers over one loaded model take turns, A-B-B-A, with the same requests; answers are compared token by token.
A ratio is the time without divided by the time with, of each round's pair; told are the median and the extremes.
"""

import argparse
import time
from collections.abc import Sequence
from statistics import median

import trio

from genbatch.actors.batcher.batcher import Batcher
from genbatch.actors.batcher.messages import Generate
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.batcher.parts import context_factory
from genbatch.actors.runtime.actor import ActorRef, start
from genbatch.nif.context.engine import load_engine
from genbatch.nif.engine_options import EngineOptions
from genbatch.proto.messages import GenerateRequest, Message, Result

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
TASKS = {"copying": COPYING, "chat": CHAT}


async def timed(ref: ActorRef, questions: Sequence[str], **fields: object) -> tuple[float, float, list[list[int]]]:
    """Seconds from the first token to the last, CPU seconds of this process from the call, and the answers."""
    answers: list[list[int]] = [[] for _ in questions]
    first = [0.0] * len(questions)

    async def ask(index: int, question: str) -> None:
        def on_token(token: object) -> None:
            first[index] = first[index] or time.perf_counter()

        wanted = GenerateRequest(messages=[Message(role="user", content=question)], **fields)  # type: ignore[arg-type]
        result = await ref.call(Generate(wanted, on_token), timeout=None)
        assert isinstance(result, Result)
        answers[index] = result.token_ids

    cpu = time.process_time()
    async with trio.open_nursery() as nursery:
        for index, question in enumerate(questions):
            nursery.start_soon(ask, index, question)
    return time.perf_counter() - min(first), time.process_time() - cpu, answers


async def measure(chosen: argparse.Namespace) -> None:
    """Prints a line a task and size."""
    engine = load_engine(EngineOptions(model_path=chosen.model, quantize=chosen.quantize))
    batchers: dict[bool, Batcher] = {}
    refs: dict[bool, ActorRef] = {}
    async with trio.open_nursery() as nursery:
        for looks_up in (False, True):
            options = BatcherOptions(n_parallel=4, batch_timeout=20.0, batch_size=0, prompt_lookup=looks_up)
            batchers[looks_up] = Batcher(context_factory(engine, options), options)
            refs[looks_up] = await start(nursery, batchers[looks_up], name=f"batcher {looks_up}")
        fields = {"max_tokens": chosen.tokens, "temperature": chosen.temperature, "seed": 7}
        for name in chosen.tasks:
            questions = TASKS[name]
            for size in chosen.sequences:
                ratios, of_cpu, rates, stats = [], [], [], batchers[True].stats
                before = stats.drafted_tokens, stats.accepted_draft_tokens
                for number in range(chosen.rounds + 1):
                    # Others of the questions in each round, and the first one warms up.
                    asked = [questions[(number + index) % len(questions)] for index in range(size)]
                    took = {}
                    for looks_up in (False, True) if number % 2 else (True, False):
                        took[looks_up] = await timed(refs[looks_up], asked, **fields)
                    (without, cpu_without, expected), (with_lookup, cpu_with, answers) = took[False], took[True]
                    assert answers == expected, "an answer has changed"
                    if number:
                        ratios.append(without / with_lookup)
                        of_cpu.append(cpu_without / cpu_with)
                        rates.append(sum(map(len, answers)) / without)
                drafted, accepted = stats.drafted_tokens - before[0], stats.accepted_draft_tokens - before[1]
                print(
                    f"{name:8} B={size}: x{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), "
                    f"of CPU time x{median(of_cpu):.2f}, {median(rates):.0f} tok/s without; "
                    f"{accepted} of {drafted} drafted tokens were right",
                    flush=True,
                )
        for ref in refs.values():
            await ref.stop()


def main() -> None:
    """Reads the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=120, help="most tokens of an answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    trio.run(measure, parser.parse_args())


if __name__ == "__main__":
    main()
