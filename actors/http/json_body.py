"""decode_json: a request's body as plain data, refusing whatever two parsers could read differently."""

import json
from typing import Any

from genbatch.proto.errors import InvalidRequest, MalformedMessage

# Objects and arrays inside one another. A schema for an answer is the deepest thing there is a use for.
MAX_NESTING = 64
_CONTAINERS = {list, dict}


def decode_json(body: bytes) -> dict[str, Any]:
    """One JSON object.

    Raises:
        MalformedMessage: no JSON, not UTF-8, NaN or an infinity, a key twice in one object, nested too deeply.
        InvalidRequest: JSON, but no object.
    """
    try:
        value = json.loads(body.decode(), object_pairs_hook=_object, parse_constant=_refuse)
    except UnicodeDecodeError:
        raise MalformedMessage("the body is not UTF-8") from None
    except RecursionError:
        raise MalformedMessage(f"the body is nested more than {MAX_NESTING} deep") from None
    except ValueError as error:  # JSONDecodeError is one; an integer of thousands of digits is another
        raise MalformedMessage(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(None, "the body must be a JSON object")
    if _is_deeper(value, MAX_NESTING):
        raise MalformedMessage(f"the body is nested more than {MAX_NESTING} deep")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("an object has the same key twice")
    return made


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number in JSON")


def _is_deeper(value: object, room: int) -> bool:
    if not isinstance(value, list | dict):
        return False
    if room == 0:
        return True
    elements = value.values() if isinstance(value, dict) else value
    if _CONTAINERS.isdisjoint(map(type, elements)):  # stays in C for long lists of token ids
        return False
    return any(_is_deeper(element, room - 1) for element in elements)
