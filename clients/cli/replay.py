"""`genbatch replay`: replay a record of `genbatch serve --record`, without the model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genbatch.clients.cli.command import BAD_INPUT, FAILURE, print_error

if TYPE_CHECKING:
    from genbatch.actors.recording.replay import Report


def replay(
    file: Annotated[Path, typer.Argument(help="A record of `genbatch serve --record`.")],
    *,
    ticks: Annotated[bool, typer.Option("--ticks", help="Print every message and tick.")] = False,
    scheduler: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Plan with another scheduler, and show the first tick that it changes."),
    ] = None,
) -> None:
    """Play a flight record to the real scheduler and KV cache, and compare each tick with the recorded one.

    This needs no model. The exit code is 0 if all ticks are equal, 1 if one differs (it is shown), and 2 if FILE is not
    a record. An incomplete or damaged record is played up to the damage.

    Example:

      genbatch replay ./incident.flight --ticks
    """
    from genbatch.actors.recording.records import RecordError, RecordReader

    try:
        RecordReader(file)  # before seconds of imports
    except RecordError as error:
        print_error(error)
        raise typer.Exit(BAD_INPUT) from error

    from genbatch.actors.recording.replay import Timeline
    from genbatch.actors.recording.replay import replay as play
    from genbatch.actors.scheduling.scheduler import SchedulerError
    from genbatch.nif.errors import OptionError

    timeline = Timeline()

    def show(header: Any, record: Any) -> None:
        typer.echo(timeline.line(header, record))

    changes = {} if scheduler is None else {"scheduler": scheduler}
    try:
        report = play(file, changes=changes, follow=show if ticks else None)
    except (RecordError, OptionError, SchedulerError) as error:
        print_error(error)
        raise typer.Exit(BAD_INPUT) from error
    _print(report)
    if report.difference is not None:
        raise typer.Exit(FAILURE)


def _print(report: "Report") -> None:
    from genbatch.actors.recording.replay import Timeline

    header, timeline = report.header, Timeline()
    typer.echo(f"{header.model}, genbatch {header.genbatch}, {header.began}: {report.num_messages} messages")
    if report.difference is None:
        typer.echo(f"all {report.num_ticks} ticks are the same")
    else:
        recorded, planned = report.difference
        typer.echo(f"{report.num_ticks} ticks are the same; tick {report.num_ticks + 1} differs")
        if report.message is not None:
            typer.echo(f"  after     {timeline.line(header, report.message)}")
        typer.echo(f"  recorded  {timeline.plan(recorded)}")
        typer.echo(f"  replayed  {timeline.plan(planned)}")
    if report.fault is not None:
        typer.echo(f"the record ends early: {report.fault}")
    elif report.end is not None:
        typer.echo(f"the record ends: {report.end}")
    elif report.difference is None:
        typer.echo(
            "the record does not say why it ends: it reached its limit, the service was killed, or it still writes"
        )
