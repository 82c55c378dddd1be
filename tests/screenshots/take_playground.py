"""The README's picture of the page: `python -m tests.screenshots.take_playground http://127.0.0.1:8000/compare FILE`.

Wants a running `genbatch serve --http :8000`, and Chromium; `dark` as a third argument takes it as seen at night.
"""

import sys
import tempfile
from pathlib import Path

import trio

from tests.actors.gateways.http.chromium import open_page

# Seconds in which the answers grow to some lines, and tokens that they may have: none is to end before.
WATCHED_S, MOST_TOKENS = 1.8, 400


async def take(url: str, target: Path, dark: bool) -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        async with open_page(url, Path(directory), size="1440,960", dark=dark) as page:
            await page.until("document.getElementById('health').textContent === 'ready'")
            await page.evaluate(f"document.getElementById('max-tokens').value = {MOST_TOKENS}")
            await page.evaluate("document.getElementById('run-all').click()")
            await trio.sleep(WATCHED_S)
            await trio.Path(target).write_bytes(await page.screenshot())


if __name__ == "__main__":
    trio.run(take, sys.argv[1], Path(sys.argv[2]), "dark" in sys.argv[3:])
