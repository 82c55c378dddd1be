"""Runs the fuzz targets under atheris, guided by coverage, one after another.

    python tests/fuzz/fuzz.py --minutes 10          # every target, that long altogether
    python tests/fuzz/fuzz.py --minutes 5 --target server

What it learns is kept in --corpus and used the next time. An input that breaks a target is written to the directory
`crashes` in it, and the exit code is not 0.
"""

import argparse
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

MAX_LENGTH = 4096
INSTRUMENTED = ["genbatch.proto", "genbatch.actors.security.security", "genbatch.actors.gateways.addresses"]


def main() -> int:
    arguments = parser().parse_args()
    if arguments.child:
        run(arguments.target, Path(arguments.corpus), arguments.minutes)
        return 0
    from tests.fuzz.targets import TARGETS

    names = [arguments.target] if arguments.target else list(TARGETS)
    command = [sys.executable, __file__, "--child", "--corpus", arguments.corpus]
    share = str(arguments.minutes / len(names))
    failed = [
        name
        for name in names
        if subprocess.run([*command, "--target", name, "--minutes", share], check=False).returncode
    ]
    print(f"fuzzed {', '.join(names)}; broken: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--minutes", type=float, default=10.0, help="altogether")
    options.add_argument("--target", help="one target only")
    options.add_argument("--corpus", default="build/fuzz", help="where what was learnt is kept")
    options.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return options


def run(name: str, corpus: Path, minutes: float) -> None:
    """Fuzzes one target in this process, which ends with it."""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        from tests.fuzz.targets import TARGETS, seeds

    learnt, crashes = corpus / name, corpus / "crashes"
    for directory in (learnt, crashes):
        directory.mkdir(parents=True, exist_ok=True)
    for index, seed in enumerate(seeds()):
        (learnt / f"seed-{index}").write_bytes(seed)
    flags = [
        f"-max_total_time={max(1, round(minutes * 60))}",
        f"-max_len={MAX_LENGTH}",
        f"-artifact_prefix={crashes}/{name}-",
        "-timeout=5",
        "-rss_limit_mb=1024",
        "-print_final_stats=1",
        "-verbosity=0",
    ]
    atheris.Setup([sys.argv[0], *flags, str(learnt)], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
