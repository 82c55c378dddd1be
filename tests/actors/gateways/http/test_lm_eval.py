"""lm-eval scores a GGUF file through the service: the same log-likelihoods alone and from 32 callers at once.

`make clients` installs lm-eval in an environment of its own. Its data sets are on the network, so the task is a file.
"""

import json
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from genbatch.nif.models.gguf_config import gguf_tokenizer
from genbatch.nif.models.gguf_file import GgufFile
from tests.actors.gateways.threaded_service import threaded_service
from tests.nif.models.gguf_files import write_llama

PROGRAM = Path(__file__).resolve().parents[4] / ".venv-clients" / "bin" / "lm_eval"
POSITIONS, QUESTIONS = 64, 40
TASK = """task: letters
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its tokenizer in a directory, and a task of questions with four answers each."""
    folder = tmp_path_factory.mktemp("lm_eval")
    write_llama(folder / "model.gguf")
    gguf_tokenizer(GgufFile("m", folder / "model.gguf")).save_pretrained(folder / "tokenizer")
    draw = random.Random(5)

    def letters(count: int) -> str:
        return "".join(draw.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=count))

    rows = [
        {
            "question": letters(draw.randint(3, 40)),
            "choices": [letters(draw.randint(1, 6)) for _ in range(4)],
            "answer": 1,
        }
        for _ in range(QUESTIONS)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "letters.yaml").write_text(TASK.format(data=folder / "data.jsonl"))
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with threaded_service(folder / "model.gguf", n_ctx=64 * POSITIONS, http=":0") as service:
        yield f"{service.addresses[0]}/v1"


def evaluate(folder: Path, url: str, callers: int) -> list[Any]:
    """The log-likelihood of every answer, in order."""
    out = folder / f"of-{callers}"
    model = f"model=model,base_url={url}/completions,tokenizer={folder / 'tokenizer'},max_length={POSITIONS}"
    command = [str(PROGRAM), "--model", "local-completions", "--tasks", "letters", "--include_path", str(folder)]
    # A client alone may fill half of the queue; lm-eval sends what is refused again.
    command += ["--model_args", f"{model},num_concurrent={callers},max_retries=20", "--batch_size", "1"]
    command += ["--output_path", str(out), "--log_samples"]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HOME": str(folder),
        "PYTHONPATH": "",
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert done.returncode == 0, [line for line in done.stderr.splitlines() if "rror" in line][:12]
    (samples,) = out.rglob("samples_letters_*.jsonl")
    rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda row: row["doc_id"])
    return [row["resps"] for row in rows]


@pytest.mark.skipif(not PROGRAM.exists(), reason="lm-eval has an environment of its own; make clients")
def test_lm_eval_gets_the_same_figures_alone_and_from_32_callers(folder: Path, url: str) -> None:
    alone = evaluate(folder, url, 1)
    assert len(alone) == QUESTIONS and len({str(answers) for answers in alone}) == QUESTIONS
    assert evaluate(folder, url, 32) == alone
