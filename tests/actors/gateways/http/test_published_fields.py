"""Every field that the SDKs' own type definitions have is sent: it works, or a 400 names it, which is documented.

A newer package may have fields that nobody has looked at. With such a version nothing may fail, and no more is checked.
"""

import os
import re
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.actors.gateways.http.published_fields import each_field
from tests.actors.gateways.http.serving import served_http

TABLE = Path(__file__).resolve().parents[4] / "docs" / "clients.md"
BEGIN, END = "<!-- refused -->\n", "<!-- end of refused -->\n"
HEAD = "| endpoint | fields of | refused by name |\n|---|---|---|\n"
CHAT = [{"role": "user", "content": "x"}]
# By path, the type of the body, and what a body needs although its type does not say so.
ENDPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/chat/completions": ("openai.types.chat.completion_create_params:CompletionCreateParamsNonStreaming", {}),
    "/v1/completions": ("openai.types.completion_create_params:CompletionCreateParamsNonStreaming", {}),
    "/v1/responses": ("openai.types.responses.response_create_params:ResponseCreateParamsNonStreaming", {"input": "x"}),
    "/v1/messages": ("anthropic.types.message_create_params:MessageCreateParamsNonStreaming", {}),
    "/api/chat": ("ollama._types:ChatRequest", {"messages": CHAT}),
    "/api/generate": ("ollama._types:GenerateRequest", {"prompt": "x"}),
}  # fmt: skip


def rows() -> dict[str, str]:
    """The table's rows by their paths."""
    table = TABLE.read_text().partition(BEGIN)[2].partition(END)[0]
    return {row.split(" | ")[0].strip("| `"): row for row in table.splitlines()[2:]}


@pytest.mark.trio
@pytest.mark.parametrize("path", ENDPOINTS)
async def test_each_published_field_works_or_is_named_by_a_400(path: str) -> None:
    place, least = ENDPOINTS[path]
    module, _, kind = place.partition(":")
    pytest.importorskip(module.partition(".")[0])
    refused: set[str] = set()
    faults = []
    async with served_http() as served:
        for name, body in each_field(getattr(import_module(module), kind), least):
            response = await served.client.post(path, json=body | {"model": "scripted"})
            if response.status_code == 200:
                continue
            error = response.json()["error"]
            told = error if isinstance(error, str) else error.get("param") or error["code"]
            field = re.sub(r"\[\d+\]", "[]", told.partition(":")[0])
            parent = field.rpartition(".")[0]  # a part of an object is refused by the object's type
            is_named = field.startswith(name) or name.startswith(field) or (parent and name.startswith(parent))
            if (response.status_code, bool(is_named)) == (400, True) or field == "previous_response_not_found":
                refused.add(field)
            else:
                faults.append((name, response.status_code, error))
    assert not [fault for fault in faults if fault[1] >= 500], faults[:5]
    package = module.partition(".")[0]
    row = f"| `{path}` | {package} {version(package)} | {', '.join(f'`{field}`' for field in sorted(refused))} |"
    if os.environ.get("WRITE_CLIENTS"):
        before, _, rest = TABLE.read_text().partition(BEGIN)
        found = rows() | {path: row}
        table = "".join(f"{found[each]}\n" for each in ENDPOINTS if each in found)
        after = rest.partition(END)[2]
        TABLE.write_text(f"{before}{BEGIN}{HEAD}{table}{END}{after}")
    known = rows()[path]
    if known.split(" | ")[1] == row.split(" | ")[1]:
        assert not faults, faults[:5]
        assert known == row, "WRITE_CLIENTS=1 writes it anew"


def test_every_endpoint_of_the_table_is_tried() -> None:
    assert list(rows()) == list(ENDPOINTS)
