"""The README's table of options."""

from genbatch.clients.cli.option_fields import SECTIONS, options


def markdown_table() -> str:
    """Every option with its default and its meaning, a table for each class of options."""
    tables = []
    for owner, title in SECTIONS.items():
        lines = [f"**{title}**", "", "| option | default | |", "|---|---|---|"]
        lines += [
            f"| `{option.name}` | {option.shown(option.default)} | {_sentence(option.text)} |"
            for option in options().values()
            if option.owner is owner
        ]
        tables.append("\n".join(lines) + "\n")
    return "\n".join(tables)


def _sentence(text: str) -> str:
    return text.replace("|", "\\|").removesuffix(".")
