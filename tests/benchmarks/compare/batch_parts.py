"""The parts without a wire: greedy tokens that agree, llama.cpp's variants, decoding and prefill of fixed batches."""

from genbatch.clients.bench.workloads import fixed_batch
from tests.benchmarks.compare.engines import LlamaVariant
from tests.benchmarks.compare.measured import Agreement, Comparison, StepFloor, agreed
from tests.benchmarks.compare.peers import QUANTISATIONS
from tests.benchmarks.compare.session import PREFILL_LENGTH, PREFILL_PROMPTS, Session

EXACT = "float32"
TEXTS = (
    "The capital of France is",
    "Once upon a time there was a lighthouse keeper who",
    "To make bread you need flour, water, salt and",
    "def fibonacci(n):\n    ",
)
SHORT, LONG = 128, 1024
PREFIX = 512
# Ratios aimed at: decoding one alone, more at once, with exact weights; prefill; with a shared prefix to without.
ALONE_GOAL, DECODE_GOAL, EXACT_GOAL, PREFILL_GOAL, PREFIX_GOAL = 1.0, 2.0, 1.3, 1.3, 1 / 1.15


class Disagreement(Exception):
    """Exact weights gave other greedy tokens than transformers; there is nothing to time."""


def agreement(session: Session) -> None:
    """Greedy tokens against transformers in float32: the same with exact weights, else a share that is stated.

    Raises:
        Disagreement: exact weights gave others.
    """
    exact, reference = session.engines.batcher(EXACT), session.engines.transformers(EXACT)
    with exact.running():
        prompts = [exact.call("tokenize", text=text)["token_ids"] for text in TEXTS]
    greedy = {"prompts": prompts, "max_tokens": session.plan.greedy_tokens}
    with reference.running():
        wanted = reference.call("greedy", **greedy)["answers"]
    timed = [session.engines.batcher(mode) for mode in session.plan.modes]
    engines = [exact, *timed]
    engines += [session.engines.llama(LlamaVariant(name, flash_attention=False)) for name in QUANTISATIONS]
    for engine in engines:
        with engine.running():
            share = agreed(engine.call("greedy", **greedy)["answers"], wanted)
        count = len(prompts) * session.plan.greedy_tokens
        session.results.agreements.append(Agreement(engine.name, reference.name, share, count))
        session.say(f"{engine.name}: {share:.0%} of the greedy tokens of {reference.name}")
        if engine is exact and share < 1:
            raise Disagreement(f"{engine.name} agrees with {reference.name} in {share:.1%} of the tokens only")
    for engine in (reference, *(one for one in engines if one not in timed)):
        session.engines.close(engine)


def variants(session: Session) -> None:
    """Every quantisation of llama.cpp with and without its fused attention: which is best for which case."""
    rates: dict[LlamaVariant, dict[str, float]] = {}
    for variant in [LlamaVariant(name, flash) for name in QUANTISATIONS for flash in (False, True)]:
        engine = session.engines.llama(variant)
        with engine.running():
            found = {"prefill": engine.call("prefill", prompts=session.prefill_prompts())["tok_s"]}
            for batch in session.plan.batches:
                prompts = session.prompts(batch, SHORT)
                call = engine.call("decode", prompts=prompts, steps=max(4, session.plan.steps // 4), copies=True)
                found[f"B={batch}"] = call["tok_s"]
        rates[variant] = found
        session.results.variants[str(variant)] = found
        session.say(f"{variant}: " + ", ".join(f"{case} {rate:.0f}" for case, rate in found.items()))
        session.engines.close(engine)  # all of them together would take half of the memory there may be
    for case in next(iter(rates.values())):
        session.best[case] = max(rates, key=lambda variant: rates[variant][case])
        exact = [variant for variant in rates if variant.quantisation == "BF16"]
        session.best[f"{case} BF16"] = max(exact, key=lambda variant: rates[variant][case])


def decode(session: Session, context: int, part: str) -> None:
    """W5 through the Batcher against llama.cpp's step, and against our kernels alone."""
    plan = session.plan
    slow = context != SHORT
    pairs = [(mode, batch) for batch in plan.batches for mode in plan.modes[:1]]
    pairs += [(mode, batch) for batch in plan.exact_batches for mode in plan.modes[1:] if not slow]
    found, floors = {}, {}
    for mode, batch in pairs:
        goal = EXACT_GOAL if mode != plan.modes[0] else DECODE_GOAL if batch > 1 else ALONE_GOAL
        case = f"W5 decode, B={batch}, context {context}"
        names = f"genbatch {mode}", str(session.variant(f"B={batch}", mode))
        found[mode, batch] = Comparison(case, *names, None if slow else goal)
        floors[mode, batch] = StepFloor(f"{mode}, context {context}", batch)
    for _ in session.rounds(part, plan.slow_rounds if slow else plan.rounds):
        for mode, batch in pairs:
            load = fixed_batch(session.options(), batch, context, output=plan.steps)
            prompts = [list(one.prompt) for one in load.requests]
            answer = load.requests[0].max_tokens
            ours = session.call(session.engines.batcher(mode), "decode", prompts=prompts, steps=answer)["tok_s"]
            llama = session.engines.llama(session.variant(f"B={batch}", mode))
            theirs = session.call(llama, "decode", prompts=prompts, steps=plan.steps, copies=slow)["tok_s"]
            found[mode, batch].add(ours, theirs)
            floor = session.call(session.engines.floor(mode), "step", batch=batch, context=context + answer // 2)
            floors[mode, batch].step_s.append(batch / ours)
            floors[mode, batch].floor_s.append(floor["seconds"])
    session.results.comparisons += found.values()
    session.results.floors += floors.values()
    if slow:
        session.results.notes.append(
            f"At context {LONG} llama.cpp prefills one prompt and copies it to every sequence, which saves time "
            "and costs its steps nothing; genbatch prefills every prompt."
        )


def prefill(session: Session) -> None:
    """Prompts of 512 alone."""
    mode = session.plan.modes[0]
    variant = session.variant("prefill", mode)
    case = f"prefill of {PREFILL_PROMPTS} prompts of {PREFILL_LENGTH}"
    found = Comparison(case, f"genbatch {mode}", str(variant), PREFILL_GOAL)
    for _ in session.rounds("prefill", session.plan.rounds):
        prompts = session.prefill_prompts()
        ours = session.call(session.engines.batcher(mode), "prefill", prompts=prompts)["tok_s"]
        found.add(ours, session.call(session.engines.llama(variant), "prefill", prompts=prompts)["tok_s"])
    session.results.comparisons.append(found)


def prefix(session: Session) -> None:
    """What a shared prefix costs a decode step: the same batch without it is the peer."""
    mode, batch = session.plan.modes[0], max(session.plan.batches)
    case = f"decode, B={batch}, after a shared prefix of {PREFIX}"
    found = Comparison(case, f"genbatch {mode}", f"genbatch {mode} without it", PREFIX_GOAL)
    for _ in session.rounds("prefix", session.plan.rounds):
        rates = []
        for shared in (PREFIX, 0):
            load = fixed_batch(session.options(), batch, SHORT, output=session.plan.steps, shared_prefix=shared)
            prompts = [list(one.prompt) for one in load.requests]
            # One first: its prefix is in the cache when the others come.
            session.call(session.engines.batcher(mode), "prefill", prompts=[prompts[0][:-1]])
            steps = load.requests[0].max_tokens
            rates.append(session.call(session.engines.batcher(mode), "decode", prompts=prompts, steps=steps)["tok_s"])
        found.add(*rates)
    session.results.comparisons.append(found)
