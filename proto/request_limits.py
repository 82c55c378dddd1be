"""RequestLimits: caps on one request, the operator's to choose."""

import msgspec


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the operator lets one request ask for.

    Args:
        max_n: answers.
        max_logprobs: likeliest tokens reported with each token.
        max_stop: stop strings, and as many stop token ids.
        max_stop_length: characters of a stop string.
        max_messages: messages of a conversation.
        max_logit_bias: token ids with a bias.
        max_grammar_bytes: of a JSON schema, grammar or regular expression that the answer must match.
        max_grammar_s: seconds of processor time that compiling one may take.
        max_deadline_s: seconds.
    """

    max_n: int = 8
    max_logprobs: int = 20
    max_stop: int = 16
    max_stop_length: int = 256
    max_messages: int = 1024
    max_logit_bias: int = 1024
    max_grammar_bytes: int = 65536
    max_grammar_s: float = 1.0
    max_deadline_s: float = 86400.0
