"""What docs/deploy says to others' programs: it is read as they read it, and run where they are installed."""

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from genbatch.clients.cli.main import load

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "docs" / "deploy"
yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")


def serve_flags() -> set[str]:
    """All that `genbatch serve` takes."""
    return {flag for parameter in load("serve").params for flag in parameter.opts}


def containers(part: Any) -> list[dict[str, Any]]:
    """Every container of a manifest."""
    if isinstance(part, list):
        return [found for one in part for found in containers(one)]
    if not isinstance(part, dict):
        return []
    return [*part.get("containers", []), *(found for one in part.values() for found in containers(one))]


def manifests() -> list[dict[str, Any]]:
    found = list(yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text()))
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "fleet.md").read_text(), re.DOTALL)
    return found + [yaml.safe_load(block) for block in blocks]


def test_manifests_start_genbatch_with_flags_that_it_has_and_probe_what_it_answers() -> None:
    assert {"RayCluster", "Deployment", "Service"} <= {one.get("kind") for one in manifests()}
    served = [one for one in containers(manifests()) if "startupProbe" in one]
    assert served
    for one in served:
        words = shlex.split(" ".join(one["args"]))
        assert "serve" in words
        flags = {word for word in words[words.index("serve") :] if word.startswith("--")}
        assert flags <= serve_flags(), flags - serve_flags()
        port = words[words.index("--http") + 1].rpartition(":")[2]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = one[probe]["httpGet"]
            assert (asked["path"], f"{asked['port']}") == ("/health", port)
            assert (asked["scheme"] == "HTTPS") == ("--tls-cert" in flags)


def test_the_ray_serve_example_is_python_that_names_flags_that_there_are() -> None:
    text = (DEPLOY / "ray_serve.py").read_text()
    compile(text, "ray_serve.py", "exec")
    assert set(re.findall(r'"(--[a-z-]+)"', text)) <= serve_flags()


def is_there(*names: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in names)


RUN = """
import json, os, sys, urllib.request
os.environ["GENBATCH_MODEL"] = sys.argv[1]
import ray
from ray import serve
ray.init(include_dashboard=False, object_store_memory=80 * 2**20, num_cpus=4, log_to_driver=False)
from ray_serve import app
serve.start(http_options={"port": 0 + int(sys.argv[2])})
serve.run(app)
body = {"model": sys.argv[3], "prompt": "Hello", "max_tokens": 4, "temperature": 0}
request = urllib.request.Request(
    f"http://127.0.0.1:{sys.argv[2]}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
)
usage = json.loads(urllib.request.urlopen(request, timeout=120).read())["usage"]
print("tokens=%d" % usage["completion_tokens"])
serve.shutdown()
"""


@pytest.mark.skipif(not is_there("ray", "grpc", "grpc_reflection", "aiohttp"), reason="ray[serve] is not installed")
def test_ray_serve_passes_requests_on(tiny_model_dir: Any) -> None:
    model = tiny_model_dir("native_llama")
    command = [sys.executable, "-c", RUN, str(model), "18431", model.name]
    done = subprocess.run(command, cwd=DEPLOY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "tokens=4" in done.stdout.split(), done.stderr[-2000:]
