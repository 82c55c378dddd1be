"""LoadingBars: what a person sees while a model is fetched, converted and loaded."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

_TITLES = {
    "start": "Starting PyTorch",
    "download": "Downloading the model",
    "convert": "Converting to safetensors",
    "load": "Loading the model",
}
_MEGABYTE = 1_000_000


class LoadingBars:
    """A context manager that is called as progress(stage, done, total), on any thread.

    Bars on a terminal, gone once the model is there; elsewhere one line as each stage begins.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=32),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bars.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            self._begin(stage)
        detail = f"{done / _MEGABYTE:.1f} / {total / _MEGABYTE:.1f} MB" if stage == "download" and total else ""
        self._bars.update(self._tasks[stage], completed=done, total=total or None, detail=detail)

    def _begin(self, stage: str) -> None:
        for earlier in self._tasks.values():
            self._bars.update(earlier, visible=False)
        title = _TITLES.get(stage, stage)
        self._tasks[stage] = self._bars.add_task(title, total=None, detail="")
        if not self._console.is_terminal:
            self._console.print(f"{title}...")
