"""Adapters over HTTP: OpenAI's `model` names them, /v1/models lists them, vLLM's endpoints load and unload them."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trio

from genbatch import open_batcher
from genbatch.actors.gateways.addresses import parse_http_address
from genbatch.actors.gateways.dispatcher import Dispatcher
from genbatch.actors.gateways.http.http_gateway import HTTPGateway
from genbatch.actors.security.security import Security
from tests.lora_adapters import PeftOracle, change_config, make_adapter
from tests.waiting import ENGINE_PATIENCE_S

PROMPT = [5, 6, 7, 8]


@asynccontextmanager
async def served(model: Path, security: Security | None = None) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of a real model without adapters."""
    options = {"dtype": "float32", "n_gpu_layers": 0, "n_ctx": 512, "runner": "torch", "served_model_name": "tiny"}
    async with open_batcher(str(model), **options) as batcher, trio.open_nursery() as nursery:
        gateway = HTTPGateway(Dispatcher(batcher.service.batcher), parse_http_address(":0"), security)
        address = await nursery.start(gateway.run)
        async with httpx2.AsyncClient(base_url=address, trust_env=False, timeout=ENGINE_PATIENCE_S) as client:
            yield client
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_adapters_are_loaded_named_listed_and_unloaded(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    base = tiny_model_dir("llama")
    adapter = make_adapter(base, tmp_path / "sql")
    oracle = PeftOracle(base, {"sql": adapter})
    async with served(base) as client:

        async def complete(model: str) -> httpx2.Response:
            body = {
                "model": model,
                "prompt": PROMPT,
                "max_tokens": 6,
                "ignore_eos": True,
                "temperature": 0,
                "logprobs": 0,
            }
            return await client.post("/v1/completions", json={**body, "return_tokens_as_token_ids": True})

        async def load(path: Path, name: str = "sql") -> httpx2.Response:
            return await client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})

        assert (await complete("sql")).status_code == 404
        for path, code, param in ((tmp_path / "x", 400, "lora_path"), (Path("x"), 400, "lora_path")):
            refused = await load(path)
            assert refused.status_code == code and refused.json()["error"]["param"] == param
        assert (await load(adapter)).text == "Success: LoRA adapter 'sql' added successfully."
        assert (await load(adapter)).status_code == 400
        cards = (await client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [("tiny", None), ("sql", "tiny")]
        assert (await client.get("/v1/models/sql")).json()["parent"] == "tiny"
        for model, name in (("sql", "sql"), ("tiny", None)):
            answer = (await complete(model)).json()
            tokens = [int(token.removeprefix("token_id:")) for token in answer["choices"][0]["logprobs"]["tokens"]]
            assert answer["model"] == model and tokens == oracle.generate(name, PROMPT, 6)
        chat = {"model": "sql", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
        assert (await client.post("/v1/chat/completions", json=chat)).json()["model"] == "sql"
        gone = await client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
        assert gone.text == "Success: LoRA adapter 'sql' removed successfully."
        again = await client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
        assert again.status_code == 404 and again.json()["error"]["param"] == "lora_name"
        assert (await complete("sql")).status_code == 404
        change_config(adapter, use_dora=True)
        faulty = (await load(adapter)).json()["error"]
        assert "adapter_config.json: use_dora" in faulty["message"]


@pytest.mark.trio
@pytest.mark.parametrize(
    "lets_in", [{"allowed_hosts": ("127.0.0.1",)}, {"allowed_origins": ("https://x.example",)}, {"http_insecure": True}]
)
async def test_an_address_that_others_may_reach_has_no_operator(
    lets_in: dict[str, Any], tiny_model_dir: Callable[[str], Path]
) -> None:
    async with served(tiny_model_dir("llama"), Security(**lets_in)) as client:
        for path, body in (
            ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}),
            ("/v1/unload_lora_adapter", {"lora_name": "a"}),
        ):
            assert (await client.post(path, json=body)).status_code == 403
        assert (await client.get("/v1/models")).status_code == 200
