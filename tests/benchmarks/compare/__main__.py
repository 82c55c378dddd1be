"""genbatch beside llama.cpp and transformers, in one run.

    python -m tests.benchmarks.compare            # 25 minutes on a quiet machine; the first run also builds llama.cpp
    python -m tests.benchmarks.compare --quick    # does everything work? Its figures mean nothing
    python -m tests.benchmarks.compare --parts agreement variants w5
    python -m tests.benchmarks.compare --model MODEL.gguf        # this file instead, beside its peers, on the terminal

Writes comparison.md, .svg and .json into a folder, but for --model.
"""

import argparse
import json
import shlex
import sys
import tempfile
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

from genbatch.clients.bench.runs import machine
from tests.benchmarks import model_files
from tests.benchmarks.compare.engines import MODES, Engines, LlamaVariant
from tests.benchmarks.compare.markdown import report
from tests.benchmarks.compare.measured import Results
from tests.benchmarks.compare.parts import run_parts
from tests.benchmarks.compare.peers import file_engines, gguf_files, peer_python
from tests.benchmarks.compare.plan import FULL, PARTS, QUICK, Plan
from tests.benchmarks.compare.plot import plot
from tests.benchmarks.compare.sigterm import exit_on_sigterm

RESULTS = Path(__file__).parents[1] / "results"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="every part once, as small as it goes")
    parser.add_argument(
        "--model", nargs="+", type=Path, metavar="FILE", help="GGUF files, see tests.benchmarks.model_files"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--modes", nargs="+", choices=[mode for mode in MODES if mode != "float32"],
                        help="genbatch's: int8 against llama.cpp's best, bfloat16 against its BF16")  # fmt: skip
    parser.add_argument("--rounds", type=int, help=f"{FULL.rounds} if not given")
    parser.add_argument("--slow-rounds", type=int, help=f"{FULL.slow_rounds} if not given")
    parser.add_argument("--minutes", type=float, help=f"the aim, {FULL.minutes:g} if not given; a part has one round")
    parser.add_argument("--results", type=Path, help=f"the folder; {RESULTS}, of a quick run a temporary one")
    options = parser.parse_args()
    if missing := [str(path) for path in options.model or () if not path.is_file()]:
        parser.error(f"--model: there is no file {missing[0]}")
    return options


def chosen_plan(options: argparse.Namespace) -> Plan:
    """The plan that the options make."""
    given = {name: getattr(options, name) for name in ("modes", "rounds", "slow_rounds", "minutes")}
    changes = {name: value for name, value in given.items() if value is not None}
    parts = [part for part in PARTS if part in options.parts]
    return replace(QUICK if options.quick else FULL, parts=parts, **changes)


def main() -> None:
    options = arguments()
    exit_on_sigterm()
    if options.model:
        for path in options.model:
            batches = model_files.BATCHES[:1] if options.quick else model_files.BATCHES
            rounds = options.rounds or (1 if options.quick else 3)
            engines = file_engines(path, model_files.MODES)
            print(model_files.tables(model_files.measure(path, engines, batches, rounds)), flush=True)
        return
    plan, results = chosen_plan(options), Results()
    if options.quick:
        results.notes.append(
            "A quick run: its loads are too small and too few for any of these figures to mean anything."
        )
    directory: Path = options.results or (
        Path(tempfile.mkdtemp(prefix="genbatch-bench-")) if options.quick else RESULTS
    )
    directory.mkdir(parents=True, exist_ok=True)
    begun = datetime.now(UTC)
    python = peer_python()
    gguf = gguf_files(python)
    with (
        tempfile.TemporaryDirectory(prefix="genbatch-") as sockets,
        Engines(Path(sockets), python, gguf) as engines,
    ):
        system = engines.llama(LlamaVariant("Q4_0", flash_attention=False)).described["system"]
        try:
            run_parts(plan, engines, results)
        finally:  # what was measured before a failure took minutes to measure
            kind, command = machine(), shlex.join(["python", "-m", "tests.benchmarks.compare", *sys.argv[1:]])
            facts = {"date": f"{begun:%Y-%m-%d %H:%M} UTC", "machine": kind, "command": command, "system": system}
            (directory / "comparison.md").write_text(report(results, **facts))
            (directory / "comparison.svg").write_text(plot(results.comparisons, f"genbatch and its peers on {kind}"))
            (directory / "comparison.json").write_text(json.dumps(facts | asdict(results), indent=2) + "\n")
            print(f"wrote {directory}/comparison.md, .svg, .json")


if __name__ == "__main__":
    main()
