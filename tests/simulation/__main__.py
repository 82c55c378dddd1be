"""Simulates the whole service under faults, a world for each seed, and prints how to replay those that fail.

The same seed then draws a crowd in little memory (crowd.py), over windows, mixed layer groups, beams and held prompts.

python -m tests.simulation --seeds 10000
python -m tests.simulation --first 4711 --seeds 1 --trace
python -m tests.simulation --first 4711 --seeds 1 --only kill2,hang1     # only these of the faults that the seed draws

Of a seed whose world fails, a short script of faults is found that fails, too, and printed as `--only`.
"""

import argparse
import gc
import hashlib
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from genbatch.nif.models.loaded_model import Model
from genbatch.nif.models.model import load_model
from tests.nif.tiny_models import build_model
from tests.simulation.crowd import Crowd
from tests.simulation.faults import Faults, shrink
from tests.simulation.fleet_world import FleetWorld
from tests.simulation.world import World

# Real seconds without the end of any world, after which those under way go in circles: one takes a fraction of one.
STUCK_S = 120.0
# Of so many seeds one has a fleet, too: gateways over replicas on nodes.
FLEET_EVERY = 4
# Failures told at length.
MAX_TOLD = 3


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a seed's world.

    Args:
        events: in order.
        fault: what is wrong with it; "" if every promise held.
        script: names of faults that suffice for a world to fail; None where the world itself did not fail.
    """

    seed: int
    events: list[str]
    fault: str
    script: list[str] | None = None


def main() -> int:
    """Exit code 1 if a seed fails, or not all of them could be judged."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000, help="how many worlds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes; one a core")
    parser.add_argument("--trace", action="store_true", help="print every event")
    parser.add_argument("--only", help="names of the faults that happen, with commas between; nothing else is run")
    chosen = parser.parse_args()
    only = None if chosen.only is None else list(filter(None, chosen.only.split(",")))
    logging.disable(logging.ERROR)  # in some worlds a user's scheduler fails, or an engine: as planned
    if chosen.jobs > 1:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the others end by it, and then there is nothing to wait for
    with tempfile.TemporaryDirectory() as directory:
        model = load_model(str(build_model("llama", Path(directory))), dtype="float32", n_gpu_layers=0)

    started, digests, num_events, failed = time.perf_counter(), dict[int, bytes](), 0, list[int]()
    for verdict in verdicts(model, range(chosen.first, chosen.first + chosen.seeds), chosen.jobs, only):
        num_events += len(verdict.events)
        digests[verdict.seed] = hashlib.sha256("\n".join(verdict.events).encode()).digest()
        if chosen.trace:
            print("\n".join(verdict.events))
        if verdict.fault:
            failed.append(verdict.seed)
            if chosen.trace or len(failed) <= MAX_TOLD:
                print(verdict.fault)
            replay = f"python -m tests.simulation --first {verdict.seed} --seeds 1 --trace"
            print(f"seed {verdict.seed} failed; replay: {replay}", flush=True)
            if verdict.script is not None:
                print(f"  these of its faults suffice: {replay} --only {','.join(verdict.script)}", flush=True)
    # The same for the same seeds, however many processes shared them.
    digest = hashlib.sha256(b"".join(digests[seed] for seed in sorted(digests))).hexdigest()[:12]
    seconds = time.perf_counter() - started
    print(f"{len(digests)} seeds, {num_events} events ({digest}), {len(failed)} failed, {seconds:.0f} s")
    return 1 if failed or len(digests) < chosen.seeds else 0


def verdicts(model: Model, seeds: range, jobs: int, only: list[str] | None = None) -> Iterator[Verdict]:
    """Judges seeds, each as soon as its world has ended, in as many processes as there are jobs."""
    gc.collect()
    gc.freeze()  # of the model and all that was imported nothing will ever be garbage
    if jobs == 1 or only is not None:
        yield from _judge_all(seeds, model, only)
        return
    processes: dict[Connection, BaseProcess] = {}
    left: dict[Connection, list[int]] = {}  # seeds that it has not judged yet
    for number in range(jobs):
        results, send = multiprocessing.Pipe(duplex=False)
        share = seeds[number::jobs]
        process = multiprocessing.get_context("fork").Process(target=_send_all, args=(share, model, send), daemon=True)
        process.start()
        send.close()
        processes[results], left[results] = process, list(share)
    while processes:
        ready = wait(list(processes), STUCK_S)
        for results in ready:
            assert isinstance(results, Connection)
            try:
                verdict: Verdict = results.recv()
            except EOFError:
                process = processes.pop(results)
                process.join()
                if process.exitcode:
                    yield Verdict(left[results][0], [], f"its process ended with {process.exitcode}")
            else:
                left[results].remove(verdict.seed)
                yield verdict
        if not ready:
            for results in processes:
                yield Verdict(left[results][0], [], f"does not end within {STUCK_S:.0f} s")
            return


def _send_all(seeds: range, model: Model, results: Connection) -> None:
    for verdict in _judge_all(seeds, model):
        results.send(verdict)


def _judge_all(seeds: range, model: Model, only: list[str] | None = None) -> Iterator[Verdict]:
    """One after another, until the end or Ctrl-C."""
    interrupts: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    for seed in seeds:
        if interrupts:
            return
        yield judge(seed, model) if only is None else judge_script(seed, model, only)


def judge(seed: int, model: Model) -> Verdict:
    """Runs a seed's world and its crowd; of every fourth seed also its fleet."""
    first = judge_script(seed, model)
    if first.fault:
        return first
    fleet = FleetWorld(seed, model)
    fault = ""
    try:
        if seed % FLEET_EVERY == 0:
            fleet.simulate()
        Crowd(seed, model).check()
    except BaseException as error:
        fault = "".join(traceback.format_exception(error))
    return Verdict(seed, first.events + fleet.events, fault)


def judge_script(seed: int, model: Model, script: list[str] | None = None) -> Verdict:
    """Runs a seed's world with these of its faults, all by default, and shrinks a script that fails."""
    world = World(seed, model, faults=Faults(script))
    try:
        world.simulate()
    except BaseException as error:
        fault = "".join(traceback.format_exception(error))
        short = shrink(world.faults.happened, lambda part: world_fails(seed, model, part))
        return Verdict(seed, world.events, fault, short)
    return Verdict(seed, world.events, "")


def world_fails(seed: int, model: Model, script: Sequence[str]) -> bool:
    """Whether a seed's world fails with these of its faults."""
    try:
        World(seed, model, faults=Faults(script)).simulate()
    except BaseException:
        return True
    return False


if __name__ == "__main__":
    sys.exit(main())
