"""A web service of your own with a model inside: FastAPI on asyncio, answers streamed as they are drawn.

    pip install fastapi uvicorn
    python examples/fastapi_app.py smollm2 8080
    curl -N 'http://127.0.0.1:8080/ask?question=Name%20a%20colour.'

A browser that goes away cancels its request, and the model works on for the others.
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from genbatch import open_batcher


def make_app(model: str) -> FastAPI:
    """The application; the model is loaded when the server starts."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with open_batcher(model, n_parallel=4) as batcher:
            app.state.batcher = batcher
            yield

    app = FastAPI(lifespan=lifespan)

    @app.get("/ask")
    async def ask(question: str, max_tokens: int = 32) -> StreamingResponse:
        async def text() -> AsyncIterator[str]:
            messages = [{"role": "user", "content": question}]
            async with app.state.batcher.stream(messages=messages, max_tokens=max_tokens) as stream:
                async for token in stream:
                    yield token.text

        return StreamingResponse(text(), media_type="text/plain")

    @app.get("/stats")
    async def stats() -> dict[str, object]:
        found = await app.state.batcher.stats()
        return {name: found[name] for name in ("requests_running", "generation_tokens", "finished")}

    return app


if __name__ == "__main__":
    uvicorn.run(make_app(sys.argv[1]), host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
