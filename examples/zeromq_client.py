"""A client in 20 lines, without genbatch: messages are msgpack arrays (proto/README.md).

python zeromq_client.py ADDRESS PROMPT
"""

import sys

import msgpack
import zmq

socket = zmq.Context.instance().socket(zmq.DEALER)
socket.linger = 100
socket.connect(sys.argv[1])
params = {"messages": [{"role": "user", "content": sys.argv[2]}], "max_tokens": 32}
socket.send(msgpack.packb([0, 1, "stream", [params]]))  # request, its number, method, parameters
while True:
    match msgpack.unpackb(socket.recv(), strict_map_key=False):
        case [2, "token", [1, _index, _token_id, text, *_more]]:
            print(text, end="", flush=True)
        case [1, 1, None, result]:
            print("\n" + result["finish_reason"], result["usage"])
            break
        case [1, _, error, None]:
            sys.exit(f"{error['code']}: {error['message']}")
socket.close()
zmq.Context.instance().term()
