"""Run from outside the checkout against the installed wheel: every package is there and the model answers."""

import importlib
import pkgutil
from importlib.resources import files

import trio

# What a GPU and traces need.
EXTRAS = {"triton", "opentelemetry"}
for layer in ("genbatch", "genbatch.nif", "genbatch.proto", "genbatch.actors", "genbatch.clients"):
    package = importlib.import_module(layer)
    assert "site-packages" in package.__path__[0], package.__path__
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".", onerror=lambda name: None):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            # Extras are not installed here; nothing else may be missing.
            assert error.name is not None and error.name.partition(".")[0] in EXTRAS, error

assert (files("genbatch.actors.gateways.http") / "static" / "index.html").is_file()
assert (files("genbatch") / "py.typed").is_file()

from genbatch import open_batcher  # noqa: E402


async def main() -> None:
    async with open_batcher("smollm2", n_parallel=2) as batcher:
        answer = await batcher.generate(
            messages=[{"role": "user", "content": "What is the capital of France?"}], max_tokens=16
        )
    assert answer.text == "The capital of France is Paris.", answer
    print("smoke: every module imports, the batcher answers", repr(answer.text))


trio.run(main)
