"""An answer that validates, whatever the model: the grammar engine holds each token to the schema.

python structured_output.py [ADDRESS]
"""

import json
import sys

from genbatch import SyncZeroMQClient

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"enum": ["France", "Japan", "Peru"]},
        "capital": {"type": "boolean"},
    },
    "required": ["city", "country", "capital"],
    "additionalProperties": False,
}
ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "ipc:///tmp/genbatch/zeromq.sock"

with SyncZeroMQClient(ADDRESS) as client:
    result = client.generate(
        messages=[{"role": "user", "content": "Tell me about Lima, as JSON."}],
        response_format={"type": "json_schema", "schema": SCHEMA},
        max_tokens=120,
    )
    # "length" would say that max_tokens cut the answer short; then it is no JSON yet.
    print(json.loads(result.text) if result.finish_reason == "stop" else result.finish_reason)
