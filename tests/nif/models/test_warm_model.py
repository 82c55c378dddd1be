"""A model that was described before starts without transformers and torch, and is the same model."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from genbatch.nif.models import warm_model
from genbatch.nif.models.architectures import ARCHITECTURES
from genbatch.nif.models.loaded_model import Model, module_shape
from genbatch.nif.models.lora import _targets
from genbatch.nif.models.model import describe_model
from genbatch.nif.models.model_source import resolve_model
from genbatch.nif.models.rope import RopeTables
from genbatch.nif.models.warm_model import keep_model, kept_model
from genbatch.nif.text.tokenizer import RESERVED, byte_characters
from tests.lora_adapters import make_adapter
from tests.nif.models.gguf_files import write_llama
from tests.nif.native.models import CONFIGS, build_native_model
from tests.nif.tiny_models import build_tokenizer

HEAVY = ("transformers", "torch", "huggingface_hub", "peft", "accelerate")

# Imports all that an engine process does, loads the model natively, and generates in every way that draws, scores or
# masks; its weights are kept when it ends.
CHILD = f"""
import sys, threading
import genbatch.actors.engine.engine_process, genbatch.actors.engine.model_side
from genbatch import open_batcher

options = dict(n_parallel=2, n_ctx=128, cpu_offload_space=0.01, prefix_cache_dir=sys.argv[2], lora=[sys.argv[3]])
with open_batcher(sys.argv[1], runner="native", dtype="float32", **options) as batcher:
    for asked in (
        dict(),
        dict(temperature=0.9, seed=4, top_p=0.9, top_k=40, min_p=0.01, logprobs=3, n=2),
        dict(temperature=1.1, seed=5, prompt_logprobs=2, repetition_penalty=1.2, logit_bias={{5: 1.0}}),
        dict(regex="[AB ]{{4,9}}", ignore_eos=False),
        dict(model="mine"),
    ):
        settings = dict(max_tokens=8, ignore_eos=True) | asked
        print([choice.token_ids for choice in batcher.generate("A B", **settings).choices])
print(sorted(set({HEAVY!r}) & set(sys.modules)))
[thread.join() for thread in threading.enumerate() if thread.name == "keep weights"]
"""


def describe(path: Path) -> Model:
    model = describe_model(str(path), dtype="float32")
    assert model is not None
    return model


def keep(path: Path) -> Model:
    """Describes a model, and writes that down."""
    model = describe(path)
    keep_model(resolve_model(str(path)), model)
    return model


def kept(path: Path) -> Model | None:
    return kept_model(str(path), resolve_model(str(path)), "float32", lambda: describe(path))


def test_a_native_engine_that_starts_again_imports_neither_transformers_nor_torch(cache: Path, tmp_path: Path) -> None:
    model = build_native_model("llama", tmp_path / "model", build_tokenizer)
    adapter = make_adapter(model, tmp_path / "adapter")

    def start() -> list[str]:
        command = [sys.executable, "-c", CHILD, str(model), str(tmp_path / "blocks"), f"mine={adapter}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ))
        return done.stdout.splitlines()

    (*cold, imported), (*warm, imported_again) = start(), start()
    assert "'transformers'" in imported and [len(json.loads(line)) for line in cold] == [1, 2, 1, 1, 1]
    assert warm == cold
    assert imported_again == "[]"


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_what_was_kept_of_an_architecture_is_what_was_described(name: str, cache: Path, tmp_path: Path) -> None:
    path = build_native_model(name, tmp_path / name, build_tokenizer)
    model = keep(path)
    again = kept(path)
    assert again is not None and again.shape is not None
    assert again.shape == module_shape(model)
    assert json.dumps(again.config.to_dict(), sort_keys=True) == json.dumps(model.config.to_dict(), sort_keys=True)
    make = ARCHITECTURES[again.shape.kind]
    assert make(again.config) == make(model.config)
    same = ("name", "dtype", "device", "groups", "layers", "vocab_size", "eos_token_ids", "max_position", "sampling")
    assert [getattr(again, field) for field in same] == [getattr(model, field) for field in same]
    partial = make(model.config).partial_rotary
    tables = [RopeTables(one.config, partial=partial, max_position=99).up_to(99) for one in (model, again)]
    for ours, theirs in zip(*tables, strict=True):
        assert np.array_equal(ours.cosines, theirs.cosines) and np.array_equal(ours.sines, theirs.sines)
    assert again.weights is not None and model.weights is not None
    assert again.weights.names() == model.weights.names()
    assert _targets(again) == _targets(model)  # makes the module after all


def test_the_tokenizer_and_the_template_are_the_same_again(cache: Path) -> None:
    model = describe_model("smollm2")
    assert model is not None
    keep_model(resolve_model("smollm2"), model)
    again = kept_model("smollm2", resolve_model("smollm2"), "float32", lambda: None)
    assert again is not None
    old, new = model.tokenizer, again.tokenizer
    for text in ("<|im_start|>user\nHi 123  4567<|im_end|>", " leading", "def f(x):\n\treturn x  # é漢😀", ""):
        assert new.encode(text) == old.encode(text)
    facts = ("vocab_size", "special_ids", "eos_token_id", "has_chat_template", "response_template", "thinks")
    assert [getattr(new, name) for name in facts] == [getattr(old, name) for name in facts]
    conversation = [{"role": "user", "content": "Hi"}]
    assert new.template_prefix(conversation) == old.template_prefix(conversation) != []
    new.set_template("{{ messages[0].content }}")
    assert new.template_prefix(conversation) != old.template_prefix(conversation)


def description(cache: Path) -> Path:
    (path,) = (cache / "described").iterdir()
    return path


@pytest.mark.parametrize("where", ["magic", "digest", "payload", "end", "empty"])
def test_a_damaged_description_is_named_once_and_made_anew(
    where: str, cache: Path, gguf: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep(gguf)
    data = bytearray(description(cache).read_bytes())
    at = {"magic": 0, "digest": 20, "payload": len(data) // 2}.get(where)
    if at is not None:
        data[at] ^= 1
    description(cache).write_bytes(data[: {"end": -1, "empty": 0}.get(where, len(data))])
    with caplog.at_level(logging.WARNING, "genbatch"):
        assert kept(gguf) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "is damaged" in caplog.text
    keep(gguf)
    assert kept(gguf) is not None


def test_a_description_that_others_could_have_written_is_not_read(cache: Path, gguf: Path) -> None:
    keep(gguf)
    description(cache).chmod(0o666)
    assert kept(gguf) is None
    description(cache).chmod(0o600)
    assert kept(gguf) is not None


def test_a_file_that_was_written_since_is_described_anew_though_its_size_and_time_are_the_same(
    cache: Path, gguf: Path
) -> None:
    keep(gguf)
    status, data = gguf.stat(), bytearray(gguf.read_bytes())
    gguf.write_bytes(data)
    os.utime(gguf, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert gguf.stat().st_mtime_ns == status.st_mtime_ns and gguf.stat().st_size == status.st_size
    assert kept(gguf) is None


def test_another_version_of_the_code_describes_anew(cache: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(gguf)
    monkeypatch.setattr(warm_model, "_version", lambda: b"another")
    assert kept(gguf) is None


def test_a_cache_that_cannot_be_written_is_named_and_the_model_is_used(
    cache: Path, gguf: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (cache / "described").write_bytes(b"no folder")
    with caplog.at_level(logging.WARNING, "genbatch"):
        keep(gguf)
    assert "the next start is slower" in caplog.text
    assert kept(gguf) is None


def test_the_descriptions_that_were_used_last_stay(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_model, "MAX_KEPT", 2)
    paths = [tmp_path / f"{number}.gguf" for number in range(3)]
    for path in paths:
        write_llama(path)
    for path in paths[:2]:
        keep(path)
    for time, path in enumerate((cache / "described").iterdir()):
        os.utime(path, ns=(time, time))  # long ago
    assert kept(paths[0]) is not None  # is used, and so the other is the older one
    keep(paths[2])
    assert [kept(path) is not None for path in paths] == [True, False, True]


def test_a_configuration_that_says_more_than_its_fields_is_not_kept(cache: Path, gguf: Path) -> None:
    model = describe(gguf)
    config: Any = model.config
    config.layer_types = object()
    keep_model(resolve_model(str(gguf)), model)
    assert kept(gguf) is None


def test_what_is_written_out_here_is_what_transformers_has() -> None:
    theirs = signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    assert frozenset(theirs) | {"messages", "self"} == RESERVED
    table: Callable[[], dict[int, str]] = bytes_to_unicode
    assert byte_characters() == table()
