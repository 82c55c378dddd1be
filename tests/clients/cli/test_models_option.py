"""`--models`: the models of a directory or a file, their options, and the mistakes that it may have."""

from pathlib import Path

import pytest

from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.service.on_demand import ModelCatalog, check_budget, file_bytes, on_demand_in
from genbatch.actors.service.options import ServiceOptions
from genbatch.actors.service.processes import open_processes
from genbatch.clients.cli.command import UsageError
from genbatch.clients.cli.serve import FleetFlags, _check_several, name_of
from genbatch.clients.cli.settings import models_on_demand
from genbatch.nif.engine_options import EngineOptions
from genbatch.nif.errors import OptionError

ENGINE = EngineOptions(model_path="of the service", n_ctx=77, dtype="float32")
BATCHER = BatcherOptions(n_parallel=3, max_queue=5)


def test_a_file_has_a_table_of_options_for_each_model(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(
        '[one]\nmodel = "a/b"\nn_ctx = 5\nkeep_alive = -1\nlora = ["law=./law"]\nquantize = "int8"\nn_parallel = 2\n'
        'max_batch_tokens = 64\n[two]\nmodel = "./two.gguf"\n'
    )
    one, two = models_on_demand(file, ENGINE, BATCHER, 300.0)
    assert (one.engine.served_model_name, one.engine.model_path, one.engine.n_ctx) == ("one", "a/b", 5)
    assert (one.keep_alive, two.keep_alive) == (-1, 300.0)
    assert (one.engine.quantize, two.engine.quantize) == ("int8", "none")
    assert (one.batcher.n_parallel, one.batcher.max_batch_tokens, one.batcher.max_queue) == (2, 64, 5)
    assert one.batcher.scheduling.max_num_requests == 2 and two.batcher == BATCHER
    assert (two.engine.n_ctx, two.engine.dtype, two.engine.lora) == (77, "float32", ())
    managed = one.managed(3)
    assert (managed.name, managed.engine, managed.adapters) == ("one", 3, ("law",))


def test_a_directory_has_models_with_the_options_of_the_service(tmp_path: Path) -> None:
    (tmp_path / "small.gguf").write_bytes(b"12345")
    [small] = models_on_demand(tmp_path, ENGINE, BATCHER, 60.0)
    assert (small.engine.served_model_name, small.engine.n_ctx, small.keep_alive) == ("small", 77, 60.0)
    assert small.managed(0).num_bytes == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "models: there is no model in"),
        ("one = 5", "models: each model needs a table with the key `model`"),
        ("[one]\nn_ctx = 5", "models: each model needs a table with the key `model`"),
        ('[one]\nmodel = "a"\nn_ctx = "many"', "n_ctx: .*table one"),
        ('[one]\nmodel = "a"\nn_cxt = 5', "n_cxt: there is no such option .*did you mean n_ctx"),
        ('[one]\nmodel = "a"\nhttp = ":80"', "http: is not an option of a single model"),
        ('[one]\nmodel = "a"\nn_parallel = 0', "n_parallel: must be at least 1, not 0 .*table one"),
        ("[one", "models: .* is not TOML"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "models.toml"
    file.write_text(text)
    with pytest.raises(OptionError, match=message):
        models_on_demand(file, ENGINE, BATCHER, 300.0)


def test_mistakes_of_the_command_line_are_told() -> None:
    with pytest.raises(OptionError, match="models: cannot read"):
        models_on_demand(Path("/no/such/file"), ENGINE, BATCHER, 300.0)
    with pytest.raises(OptionError, match="models: needs engine = process"):
        ServiceOptions(models="x", engine="thread")
    for value in (float("nan"), float("inf")):
        with pytest.raises(OptionError, match="keep_alive"):
            ServiceOptions(keep_alive=value)
    with pytest.raises(UsageError, match="two models have the name a"):
        _check_several(ENGINE, ServiceOptions(engine="process"), FleetFlags(), ["a", "a"])
    assert name_of(EngineOptions(model_path="./x/small.gguf")) == "small"


@pytest.mark.trio
async def test_a_budget_that_no_model_fits_into_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for name, size in (("large.gguf", 3000), ("small.gguf", 2000)):
        (tmp_path / name).write_bytes(bytes(size))
    catalog = ModelCatalog(models_on_demand(tmp_path, ENGINE, BATCHER, 60.0))
    options = ServiceOptions(engine="process", bind=f"ipc://{tmp_path}/sock", model_memory=1000 / 2**30)
    with pytest.raises(OptionError, match=r"model_memory: no model fits .* the smallest model, small, takes"):
        async with open_processes(catalog, BATCHER, options):
            pass
    check_budget([each.managed(0) for each in catalog.models], 2000 / 2**30)  # one fits
    check_budget([each.managed(0) for each in catalog.models], 0.0)  # nobody has set a budget


def test_a_directory_lists_its_models_by_name(tmp_path: Path) -> None:
    for path in ("one.gguf", "two/config.json", "two/model.safetensors", "three/x.gguf", "notes.txt"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("12345")
    (tmp_path / "empty").mkdir()
    assert on_demand_in(tmp_path) == {
        "one": str(tmp_path / "one.gguf"),
        "three": str(tmp_path / "three/x.gguf"),
        "two": str(tmp_path / "two"),
    }
    assert [file_bytes(str(tmp_path / name)) for name in ("one.gguf", "two", "missing")] == [5, 5, 0]
