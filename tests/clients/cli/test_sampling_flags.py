"""The flags that become parameters of a request."""

from pathlib import Path

import pytest
import typer

from genbatch.clients.cli.generate import SamplingFlags
from genbatch.clients.interface import build_request
from genbatch.proto.validation import Grammar, grammar_of


def test_a_schema_a_grammar_and_a_regex_come_from_their_flags(tmp_path: Path) -> None:
    schema, grammar = tmp_path / "person.json", tmp_path / "answer.gbnf"
    schema.write_text('{"const": "é"}', encoding="utf-8-sig")
    grammar.write_text('root ::= "yes"')

    def asked(flags: SamplingFlags) -> Grammar | None:
        return grammar_of(build_request("x", None, flags.request_params()))

    assert asked(SamplingFlags()) is None
    # The file, or what would stand in it.
    for given in (str(schema), '{"const": "é"}'):
        assert asked(SamplingFlags(json_schema=given)) == Grammar(
            "json_schema", '{"const": "é"}', "response_format.schema"
        )
    for given in (str(grammar), 'root ::= "yes"'):
        assert asked(SamplingFlags(grammar=given)) == Grammar("grammar", 'root ::= "yes"', "grammar")
    assert asked(SamplingFlags(regex="[0-9]+")) == Grammar("regex", "[0-9]+", "regex")


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    schema = tmp_path / "person.json"
    schema.write_bytes(b"\xff\xfe")
    with pytest.raises(typer.BadParameter, match="UTF-8"):
        SamplingFlags(json_schema=str(schema)).request_params()


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match=r"nowhere\.gbnf cannot be read: No such file"):
        SamplingFlags(grammar="nowhere.gbnf").request_params()
