"""`genbatch generate`: stream the answer to one prompt. `genbatch embed`: print the vectors of texts.

The flags of the sampling parameters are here, too.
"""

import math
import sys
from dataclasses import dataclass
from inspect import Parameter
from typing import Annotated, Any, cast, get_type_hints

import msgspec
import trio
import typer
from rich.markup import escape

from genbatch.clients.cli.command import UsageError, printable, run_command, with_flag_groups
from genbatch.clients.cli.connection import ConnectionFlags, open_client
from genbatch.clients.cli.option_flags import ModelFlags, OptionFlags, arguments_of, sentence
from genbatch.clients.interface import Client, GenerateParams, build_request
from genbatch.nif.models.model_names import written_path
from genbatch.proto.errors import InvalidRequest
from genbatch.proto.messages import GenerateRequest, Result
from genbatch.proto.validation import SAMPLING_RANGES, Grammar, RequestLimits, grammar_of, validate_request

_SAMPLING = "Sampling (None: the flag is not given)"
_SHAPE = "Shape of the answer"


# The limits of a request are the operator's, and the service checks them.
_ANY = RequestLimits(
    max_stop=sys.maxsize, max_stop_length=sys.maxsize, max_grammar_bytes=sys.maxsize, max_deadline_s=math.inf
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFlags:
    """The form of the prompt."""

    system: Annotated[str | None, typer.Option("--system", "-s", metavar="TEXT", help="The system prompt.")] = None
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")] = False

    def of(self, text: str) -> tuple[str | None, list[dict[str, str]] | None]:
        """Return the `prompt` and the `messages` to send; one of them is None.

        Raises:
            UsageError: a raw prompt with a system prompt.
        """
        if self.raw and self.system is not None:
            raise UsageError("system: a raw prompt has no system prompt")
        if self.raw:
            return text, None
        turns = [] if self.system is None else [{"role": "system", "content": self.system}]
        return None, [*turns, {"role": "user", "content": text}]


_DRAWING = ("max_tokens", *SAMPLING_RANGES, "seed", "stop", "min_tokens", "ignore_eos", "deadline_s")


class SamplingFlags(OptionFlags):
    """The parameters of a GenerateRequest, with their names and the texts of its "Args:"."""

    @classmethod
    def parameters(cls) -> list[Parameter]:
        """See OptionFlags."""
        texts, hints = arguments_of(GenerateRequest), get_type_hints(GenerateRequest)
        flags: list[Parameter] = []
        for field in msgspec.structs.fields(GenerateRequest):
            if field.name in _DRAWING:
                kind, default, text = hints[field.name], field.default, texts[field.name]
                names, metavar = ["--ignore-eos"] if kind is bool else [], None
                if field.name == "stop":
                    kind, default, metavar = list[str] | None, None, "TEXT"
                    text = f"{text.removesuffix('.')}; may be repeated"
                look = typer.Option(*names, metavar=metavar, help=escape(sentence(text)), rich_help_panel=_SAMPLING)
                flags.append(_flag(field.name, kind, default, look))
        return [*flags, *_SHAPE_FLAGS]

    def request_params(self) -> GenerateParams:
        """Return the parameters of a client's `generate` and `stream`.

        Raises:
            typer.BadParameter: a file is not text.
        """
        params = {name: self.values[name] for name in _DRAWING if self.values.get(name) not in (None, [])}
        schema, grammar, regex = (self.values.get(name) for name in ("json_schema", "grammar", "regex"))
        if schema is not None:
            text = _text_of(schema, "--json-schema", schema.lstrip().startswith("{"))
            params["response_format"] = {"type": "json_schema", "schema": text}
        if grammar is not None:
            params["grammar"] = _text_of(grammar, "--grammar", "::=" in grammar or "\n" in grammar)
        if regex is not None:
            params["regex"] = regex
        return cast("GenerateParams", params)


def _flag(name: str, kind: Any, default: Any, look: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, look])


def _shape_flag(name: str, metavar: str, text: str) -> Parameter:
    return _flag(name, str | None, None, typer.Option(metavar=metavar, help=text, rich_help_panel=_SHAPE))


_SHAPE_FLAGS = (
    _shape_flag("json_schema", "FILE", "Answer in JSON of this schema: a file, or the text of the schema."),
    _shape_flag("grammar", "FILE", "Answer in this Lark or GBNF grammar: a file, or the text of the grammar."),
    _shape_flag("regex", "REGEX", "Answer in the form of this regular expression."),
)


def check_request(prompt: str | None, messages: list[dict[str, str]] | None, parameters: GenerateParams) -> None:
    """Check a request as far as possible without a model.

    Raises:
        InvalidRequest: with the name of the parameter at fault.
    """
    request = build_request(prompt, messages, parameters)
    validate_request(request, _ANY)
    grammar = grammar_of(request)
    if grammar is not None:
        _check_grammar(grammar)


def _check_grammar(grammar: Grammar) -> None:
    """Check that a grammar can be parsed; without the extra that parses it, the service checks it."""
    try:
        from genbatch.nif.sampling.grammar import why_unreadable
    except ImportError:
        return
    if reason := why_unreadable(grammar.kind, grammar.text):
        raise InvalidRequest(grammar.field, reason)


def _text_of(value: str, flag: str, is_text: bool) -> str:
    """Return the text of the file that a flag names, or the flag's value if that is the text.

    Raises:
        typer.BadParameter: there is no such file, or it is not text.
    """
    if is_text:
        return value
    try:
        return written_path(value).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise typer.BadParameter(f"{value} is not text in UTF-8", param_hint=flag) from None
    except OSError as error:
        raise typer.BadParameter(f"{value} cannot be read: {error.strerror}", param_hint=flag) from None


@with_flag_groups
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    *,
    form: PromptFlags,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON at the end.")] = False,
    connection: ConnectionFlags,
    sampling: SamplingFlags,
    engine: ModelFlags,
) -> None:
    """Answer one prompt, streamed to standard output.

    Examples:

      genbatch generate "What is the capital of France?"

      genbatch generate "Once upon a time" --raw --max-tokens 40 --temperature 0.8 --seed 7

      genbatch generate - --connect tcp://127.0.0.1:5555 --json < question.txt
    """
    text = sys.stdin.read() if prompt == "-" else prompt

    async def answer() -> None:
        arguments = (*form.of(text), sampling.request_params())
        check_request(*arguments)
        async with open_client(connection, engine, finds_running=True) as client:
            if json:
                await _print_json(client, *arguments)
            else:
                await _stream(client, *arguments)

    run_command(answer)


async def _print_json(
    client: Client, prompt: str | None, messages: list[dict[str, str]] | None, parameters: GenerateParams
) -> None:
    result = await client.generate(prompt, messages=messages, **parameters)
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")


async def _stream(
    client: Client, prompt: str | None, messages: list[dict[str, str]] | None, parameters: GenerateParams
) -> None:
    started_at = trio.current_time()
    written, is_terminal = False, sys.stdout.isatty()
    async with client.stream(prompt, messages=messages, **parameters) as stream:
        try:
            async for token in stream:
                sys.stdout.write(printable(token.text, is_terminal=is_terminal))
                sys.stdout.flush()
                written = True
        finally:
            if written:  # the next output, perhaps an error, begins a line
                sys.stdout.write("\n")
                sys.stdout.flush()
    _print_summary(stream.result, trio.current_time() - started_at)


def _print_summary(result: Result, seconds: float) -> None:
    """Print a summary on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        return
    from rich.console import Console

    count = result.usage.completion_tokens
    summary = f"{result.finish_reason}: {count} tokens in {seconds:.1f} s, {count / seconds:.1f} tok/s"
    Console(stderr=True).print(summary, style="dim")


@with_flag_groups
def embed(
    texts: Annotated[list[str], typer.Argument(help="The texts; - reads them from standard input, one in each line.")],
    *,
    dimensions: Annotated[
        int | None, typer.Option(help="The elements to keep of each vector, for models that are trained for that.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
    connection: ConnectionFlags,
    engine: ModelFlags,
) -> None:
    """Print an embedding for each text, as lines of JSON in the order of the texts.

    Examples:

      genbatch embed "a first text" "a second one" --model ./all-MiniLM-L6-v2

      genbatch embed - --connect tcp://127.0.0.1:5555 < texts.txt > vectors.jsonl
    """
    inputs = sys.stdin.read().splitlines() if texts == ["-"] else texts

    async def answer() -> None:
        if not inputs:
            raise UsageError("texts: standard input is empty")
        async with open_client(connection, engine, n_parallel=8, finds_running=True) as client:
            vectors = await client.embed(inputs, dimensions=dimensions)
        if json:
            sys.stdout.write(msgspec.json.encode(vectors).decode() + "\n")
            return
        for vector in vectors.embeddings:
            sys.stdout.write(msgspec.json.encode(vector).decode() + "\n")

    run_command(answer)
