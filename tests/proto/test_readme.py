"""The client printed in proto/README.md works as it stands, and the page names everything there is."""

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import trio

from genbatch.proto.errors import CLASSES
from genbatch.proto.messages import GenerateRequest, Result
from tests.actors.gateways.scripted_batcher import served

README = (Path(__file__).parent.parent.parent / "proto" / "README.md").read_text()


@pytest.mark.trio
async def test_the_printed_client_streams_an_answer(tmp_path: Path) -> None:
    found = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert found is not None
    program = found[1].replace('"messages": [{"role": "user", "content": "Name a colour."}]', '"prompt": "blue green"')
    assert program != found[1]
    async with served(tmp_path) as service:
        done = await trio.run_process(
            [sys.executable, "-c", program, service.address], capture_stdout=True, stderr=subprocess.STDOUT
        )
        assert service.batcher.requests[0].request.stop == ["\n"]
    assert done.stdout.decode().startswith("bluegreen\nstop {'prompt_tokens': 3")


def test_every_code_parameter_and_key_is_on_the_page() -> None:
    fields = msgspec.structs.fields(GenerateRequest) + msgspec.structs.fields(Result)
    for name in [*CLASSES, *(field.name for field in fields)]:
        assert f"`{name}`" in README, name
