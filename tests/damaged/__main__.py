"""Drawn model files for some minutes: python -m tests.damaged --minutes 10 --seed 1"""

import argparse
import importlib.util
import sys
import tempfile
import time
from pathlib import Path

from tests.damaged.run import make_good, run


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1_000)
    options = parser.parse_args()
    path = Path(__file__).parent.parent / "nif" / "tiny_models.py"
    spec = importlib.util.spec_from_file_location("tiny_models", path)
    assert spec is not None and spec.loader is not None
    tiny_models = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny_models)
    with tempfile.TemporaryDirectory() as folder:
        make_good(tiny_models, Path(folder))
        until = time.monotonic() + 60 * options.minutes
        refused, wrong = run(Path(folder), Path(folder) / "drawn", options.seed, 10**9, until)
    print(f"{refused} refused")
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
