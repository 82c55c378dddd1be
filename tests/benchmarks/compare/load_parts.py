"""The parts with loads: W2, W3, W4 and W6 over ZeroMQ with the same client, and transformers' own batching."""

from dataclasses import replace
from statistics import median

from genbatch.clients.bench.workloads import (
    POISSON_LOADS,
    SYSTEM_PROMPT_TOKENS,
    chat,
    long_prefill,
    shared_prompt,
)
from tests.benchmarks.compare.engine_process import EngineProcess
from tests.benchmarks.compare.engines import W6_CTX_SEQ, W6_SLOTS
from tests.benchmarks.compare.measured import Comparison
from tests.benchmarks.compare.session import Session

# Ratios aimed at.
LOAD_GOAL, TRANSFORMERS_GOAL = 2.0, 6.0
STATIC_PROMPT = 128


def chats(session: Session, part: str) -> None:
    """W2 or W3 with all requests at once; the first mode in rounds, the others in slow ones."""
    for index, mode in enumerate(session.plan.modes):
        variant = session.variant(f"B={max(session.plan.batches)}", mode)
        service, llama = session.engines.service(mode), session.engines.llama(variant)
        found: Comparison | None = None
        for _ in session.rounds(part, session.plan.slow_rounds if index else session.plan.rounds):
            load = session.chat_load(part)
            goal = None if index else LOAD_GOAL
            found = found or Comparison(load.name, service.name, str(variant), goal)
            ours = session.send(service, service.address, load)
            if part == "w3":
                shared = load.requests[0].prompt[: session.chat_options().scaled(SYSTEM_PROMPT_TOKENS)]
                session.call(llama, "keep_prefix", tokens=list(shared))
            theirs = session.send(llama, session.engines.llama_address(variant), load)
            found.add(ours["output_throughput"], theirs["output_throughput"])
            if part == "w2" and not index:
                session.capacity = ours["request_throughput"]
        assert found is not None
        session.results.comparisons.append(found)
    if part == "w3":
        session.results.notes.append(
            "W3: llama.cpp evaluates the shared prompt before its clock starts, and copies it to each request; "
            "genbatch finds it by itself while the clock runs."
        )
        _without_sharing(session)


def _without_sharing(session: Session) -> None:
    """What sharing is worth: the same lengths with nothing to share."""
    mode = session.plan.modes[0]
    case = f"W3, sharing against none, genbatch {mode} served"
    found = Comparison(case, "shared", "of its own each")
    service = session.engines.service(mode)
    for _ in range(session.plan.slow_rounds):
        loads = [shared_prompt(session.chat_options(), sharing=sharing) for sharing in (True, False)]
        found.add(*(session.send(service, service.address, load)["output_throughput"] for load in loads))
    session.results.comparisons.append(found)


def poisson(session: Session) -> None:
    """W4: latencies of our own service at shares of its capacity."""
    service = session.engines.service(session.plan.modes[0])
    if session.capacity is None:
        figures = session.send(service, service.address, session.chat_load("w2"), keep=False)
        session.capacity = figures["request_throughput"]
    for _ in range(session.plan.slow_rounds):
        for share in POISSON_LOADS:
            options = replace(session.chat_options(), num_prompts=session.plan.poisson_prompts)
            load = chat(options, f"W4 chat at {share:g} of capacity")
            session.send(service, service.address, load, rate=share * session.capacity)


def long_prompt(session: Session) -> None:
    """W6: what a prompt of 8,000 does to answers under way."""
    mode = session.plan.modes[0]
    service, variant = session.engines.service(mode), session.variant("prefill", mode)
    for _ in range(session.plan.slow_rounds):
        load = long_prefill(session.chat_options())
        session.send(service, service.address, load)
        llama = session.engines.llama(variant, W6_SLOTS, W6_CTX_SEQ)
        session.send(llama, session.engines.llama_address(variant, W6_SLOTS), load)
        session.engines.close(llama)


def transformers(session: Session) -> None:
    """W2 and W3 through `generate_batch` and fixed batches through `generate`, in transformers' own process."""
    for dtype, parts in (("bfloat16", ("w2", "w3")), ("float32", ("w2",))):
        engine = session.engines.transformers(dtype)
        for part in parts:
            _generate_batch(session, engine, part, f"transformers generate_batch {dtype}")
        for batch in session.plan.batches[1:]:
            prompts = session.prompts(batch, STATIC_PROMPT)
            rate = session.call(engine, "generate", prompts=prompts, max_tokens=session.plan.steps)["tok_s"]
            session.results.notes.append(
                f"transformers generate {dtype}, static batch, B={batch}, prompts of {STATIC_PROMPT}, "
                f"{session.plan.steps} new tokens, prefill included: {rate:.0f} tok/s."
            )
        session.engines.close(engine)


def _generate_batch(session: Session, engine: EngineProcess, part: str, name: str) -> None:
    """Compares one run, without a wire, with the median of what ours did over ZeroMQ."""
    load = session.chat_load(part)
    reply = session.call(
        engine,
        "load",
        prompts=[list(one.prompt) for one in load.requests],
        max_tokens=[one.max_tokens for one in load.requests],
        limit_s=session.plan.limit_s,
    )
    session.say(f"{load.name}, {name}: {reply['tok_s']:.0f} tok/s, {reply['done']} of {reply['of']} done")
    if reply["done"] < reply["of"]:
        session.results.notes.append(
            f"{load.name}, {name}: cut off after {session.plan.limit_s:.0f} s with {reply['done']} of {reply['of']} "
            "requests done; its rate is that of all tokens until then."
        )
    for one in [one for one in session.results.comparisons if one.case == load.name and one.goal == LOAD_GOAL]:
        found = Comparison(load.name, one.ours, name, TRANSFORMERS_GOAL)
        found.add(median(one.ours_tok_s), reply["tok_s"])
        session.results.comparisons.append(found)
