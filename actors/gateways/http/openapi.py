"""What is served, as OpenAPI and as a page: both are made of the table that the routes are made of."""

import html
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

_SCHEMAS = "#/components/schemas/{name}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One path.

    Args:
        path: as Starlette writes it.
        endpoint: what answers.
        summary: what it is for, in a line.
        body: the type of a POST's body; None is a GET.
    """

    path: str
    endpoint: Any
    summary: str
    body: type | None = None

    @property
    def method(self) -> str:
        """HTTP's."""
        return "GET" if self.body is None else "POST"

    @property
    def shown(self) -> str:
        """The path as OpenAPI writes it."""
        return re.sub(r":\w+}", "}", self.path)


def describe_api(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The OpenAPI document."""
    bodies = [endpoint.body for endpoint in endpoints if endpoint.body is not None]
    _, schemas = msgspec.json.schema_components(bodies, ref_template=_SCHEMAS)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        told: dict[str, Any] = {
            "summary": endpoint.summary,
            "responses": {"200": {"description": "as the API that the path is of has it"}},
        }
        if endpoint.body is not None:
            schema = {"$ref": _SCHEMAS.format(name=endpoint.body.__name__)}
            told["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
            told["responses"]["400"] = {"description": "{error: {message, type, param, code}}: param is at fault"}
        names = re.findall(r"{(\w+)}", endpoint.shown)
        if names:
            told["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
        paths.setdefault(endpoint.shown, {})[endpoint.method.lower()] = told
    return {
        "openapi": "3.1.0",
        "info": {"title": "genbatch", "version": "1", "description": "One language model, shared by many callers."},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"token": []}],
    }


def docs_page(endpoints: Sequence[Endpoint]) -> str:
    """The same for people; nothing of it is loaded from elsewhere."""
    parts = []
    for endpoint in endpoints:
        parts.append(f'<section class="card"><h2>{endpoint.method} {html.escape(endpoint.shown)}</h2>')
        parts.append(f"<p>{html.escape(endpoint.summary)}</p>")
        if endpoint.body is not None:
            rows = "".join(
                f"<tr><td><code>{field.name}</code></td><td><code>{html.escape(_type_name(field.type))}</code></td>"
                f"<td>{'required' if field.required else ''}</td></tr>"
                for field in msgspec.structs.fields(endpoint.body)
            )
            parts.append(f"<details><summary>{_first_line(endpoint.body)}</summary><table>{rows}</table></details>")
        parts.append("</section>")
    return _PAGE.replace("{{sections}}", "".join(parts))


def _type_name(wanted: Any) -> str:
    return (wanted.__name__ if isinstance(wanted, type) else str(wanted)).replace("typing.", "").rpartition("http.")[2]


def _first_line(body: type) -> str:
    return html.escape((inspect.getdoc(body) or "").partition("\n")[0])


_PAGE = """<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <meta name="color-scheme" content="light dark">
  <title>genbatch API</title>
  <link rel="icon" href="favicon.svg" type="image/svg+xml">
  <link rel="stylesheet" href="playground.css">
  <link rel="stylesheet" href="chat.css">
</head>
<body>
  <header class="top"><img src="favicon.svg" alt="" width="28" height="28"><h1>genbatch API</h1>
    <nav aria-label="Pages"><a href="/">chat</a> <a href="/openapi.json">openapi.json</a></nav></header>
  <main class="chat docs">{{sections}}</main>
</body>
</html>
"""
