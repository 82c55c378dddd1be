"""Programs as people write them, over the clients that people use: python client_programs.py CLIENT URL.

Runs everything that is tried with one client and prints, as JSON, its version and what passed. It needs that client and
nothing of ours. The model is random: what is shown is that calls come through, validate, and can be answered.
"""

import json
import sys
import traceback
from importlib.metadata import version

import api_programs  # noqa: F401  # its programs are added to TRIED, as those of the next module
import framework_programs  # noqa: F401
from tried import TRIED

PACKAGES = {
    "llama-index": "llama-index-llms-openai-like",
    "pydantic-ai": "pydantic-ai-slim",
    "haystack": "haystack-ai",
}


def main(client: str, url: str) -> None:
    """Prints {"version", "passed": [...], "failed": {what: traceback}}."""
    passed, failed = [], {}
    for what, function in TRIED[client].items():
        try:
            function(url)
            passed.append(what)
        except Exception:
            failed[what] = traceback.format_exc()[-2000:]
    print(json.dumps({"version": version(PACKAGES.get(client, client)), "passed": passed, "failed": failed}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
