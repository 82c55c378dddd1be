"""The client printed in proto/README.md works as it stands, and the page names everything there is."""

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import trio

from genbatch.proto.errors import CLASSES
from genbatch.proto.messages import DetokenizeRequest, GenerateRequest, Result, Text, TokenIds, TokenizeRequest
from genbatch.proto.methods import METHODS
from genbatch.proto.rpc import StreamOptions
from genbatch.proto.service_messages import Drained, DrainRequest, Health, Hello, HelloRequest, ModelCard
from tests.actors.gateways.scripted_batcher import served

README = (Path(__file__).parent.parent.parent / "proto" / "README.md").read_text()


PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.trio
@pytest.mark.parametrize(("program", "transport"), [*zip(PROGRAMS, ["ipc", "unix"], strict=True)], ids=["ipc", "unix"])
async def test_the_printed_clients_stream_an_answer(tmp_path: Path, program: str, transport: str) -> None:
    asked = program.replace('"messages": [{"role": "user", "content": "Name a colour."}]', '"prompt": "blue green"')
    assert asked != program
    async with served(tmp_path, transport) as service:
        done = await trio.run_process(
            [sys.executable, "-c", asked, service.address], capture_stdout=True, stderr=subprocess.STDOUT
        )
        assert service.batcher.requests[0].request.max_tokens == 32
    assert done.stdout.decode().startswith("bluegreen\nstop {'prompt_tokens': 3")


STRUCTS = (
    *(TokenizeRequest, DetokenizeRequest, DrainRequest, HelloRequest),
    *(TokenIds, Text, Drained, Hello, Health, ModelCard),
)


def test_every_code_parameter_and_key_is_on_the_page() -> None:
    fields = msgspec.structs.fields(GenerateRequest) + msgspec.structs.fields(Result)
    fields += msgspec.structs.fields(StreamOptions)
    for name in [*CLASSES, *(field.encode_name for field in fields), *METHODS]:
        assert f"`{name}`" in README, name
    for struct in STRUCTS:
        for field in msgspec.structs.fields(struct):
            assert f"`{field.name}`" in README or f'"{field.name}"' in README, field.name
