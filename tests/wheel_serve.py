"""Asks the installed program for a tool call over HTTP: `genbatch serve`, found on the PATH, without a compiler."""

import json
import shutil
import subprocess
import time
import urllib.request

assert not any(map(shutil.which, ("cc", "gcc", "clang"))), "a compiler would hide that the wheel brings no kernels"
weather = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
body = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "How is the weather in Paris?"}],
    "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": weather, "strict": True}}],
    "tool_choice": "required",
    "max_tokens": 64,
}
command = ["genbatch", "serve", "smollm2", "--http", "127.0.0.1:0"]
service = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
assert service.stdout is not None
url = ""
try:
    began, log = time.monotonic(), []
    for line in service.stdout:
        log.append(line)
        if (place := line.find("http://")) >= 0:
            url = line[place:].split()[0]
            break
    assert url and not any("torch, about" in line for line in log), "".join(log)
    content = json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", content, {"Content-Type": "application/json"})
    answer = json.load(urllib.request.urlopen(request, timeout=300))
    call, *_ = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather" and "city" in json.loads(call["function"]["arguments"])
    print(f"wheel: a tool call {time.monotonic() - began:.1f} s after the start:", call["function"])
finally:
    service.terminate()
    service.wait()
