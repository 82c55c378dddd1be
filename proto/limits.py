"""How much a decoder takes in, before it knows who sent it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLimits:
    """Bounds on one message.

    Args:
        max_bytes: bytes of the whole message.
        max_nesting: arrays and maps inside one another; [1] has nesting 1.
        max_array_length: elements of one array.
        max_map_length: entries of one map.
        max_containers: arrays and maps of the whole message.
    """

    max_bytes: int
    max_nesting: int = 16
    max_array_length: int
    max_map_length: int
    max_containers: int = 2**14


# What a service takes. A prompt of 2**18 token ids is beyond any context here; a map is parameters or a logit bias.
REQUEST_LIMITS = DecodeLimits(max_bytes=2**20, max_array_length=2**18, max_map_length=1024)

# What a client takes: log-probs of 20 candidates for every token of a long prompt are some 20 MiB.
RESPONSE_LIMITS = DecodeLimits(max_bytes=2**26, max_array_length=2**20, max_map_length=4096, max_containers=2**21)

# The transport cuts a peer off beyond this many bytes a frame. Above REQUEST_LIMITS, so that a message
# that is merely too large gets an error that says so.
MAX_TRANSPORT_BYTES = 4 * REQUEST_LIMITS.max_bytes
