"""ReplicaConnection over a real service: what a fleet sends comes back, and what is closed is unavailable."""

from collections.abc import Callable
from pathlib import Path

import pytest

from genbatch import open_batcher
from genbatch.clients.fleet.replicas import ReplicaConnection
from genbatch.clients.transports import ZeroMQTransport
from genbatch.proto.errors import InvalidRequest, Unavailable
from genbatch.proto.messages import DetokenizeRequest, GenerateRequest, Message, Token, TokenizeRequest
from genbatch.proto.service_messages import DrainRequest, HealthRequest, ModelsRequest, StatsRequest


@pytest.mark.trio
async def test_every_call_of_a_fleet_reaches_a_service(tiny_model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/replica.sock"
    connection = ReplicaConnection(ZeroMQTransport(address))
    async with open_batcher(
        str(tiny_model_dir("llama")), dtype="float32", n_gpu_layers=0, batch_timeout=0.0, bind=address
    ) as batcher:
        async with connection:
            tokens: list[Token] = []
            for request in (
                GenerateRequest(prompt="Hello", max_tokens=5, tenant="a"),
                GenerateRequest(token_ids=[5, 6, 7], max_tokens=5, ignore_eos=True, n=2, temperature=1.0, seed=3),
                GenerateRequest(messages=[Message(role="user", content="Hello")], max_tokens=5, stop=["x"]),
            ):
                whole = await connection.generate(request, None)
                tokens.clear()
                streamed = await connection.generate(request, tokens.append)
                assert streamed.text == whole.text and streamed.choices == whole.choices
                assert len(tokens) == whole.usage.completion_tokens
            wanted = await batcher.generate("Hello", max_tokens=5, tenant="a")
            again = await connection.generate(GenerateRequest(prompt="Hello", max_tokens=5, tenant="a"), None)
            assert again.token_ids == wanted.token_ids

            ids = await connection.ask(TokenizeRequest(prompt="Hello"))
            assert (await connection.ask(DetokenizeRequest(token_ids=ids.token_ids))).text == "Hello"
            assert (await connection.ask(ModelsRequest())).models[0].n_ctx
            assert (await connection.ask(HealthRequest())).status == "ready"
            assert (await connection.ask(StatsRequest()))["steps"] > 0
            with pytest.raises(InvalidRequest, match="max_tokens"):
                await connection.generate(GenerateRequest(prompt="a", max_tokens=0), None)
            assert (await connection.ask(DrainRequest(timeout_s=1.0))).num_cancelled == 0
            with pytest.raises(Unavailable):
                await connection.generate(GenerateRequest(prompt="a"), None)
        with pytest.raises(Unavailable, match="was closed"):
            await connection.ask(HealthRequest())
