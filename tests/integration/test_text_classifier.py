"""A text classifier in a process of its own: the answers of transformers, whatever list a text comes in."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForSequenceClassification

from llm.exceptions import InvalidRequest, ModelUnavailable, WorkerDied
from multi_model.messages import Classes, PredictorSpec, TextInput
from multi_model.workers.process import ProcessConfig
from multi_model.workers.transformer import TransformerWorker
from tests.integration.engines import FORKSERVER, no_logs
from tests.integration.tiny_models import text_classifier

pytestmark = pytest.mark.asyncio(loop_scope="module")

_CONFIG = ProcessConfig(FORKSERVER, no_logs, lambda: 1, load_timeout=60.0, batch_timeout=20.0)
_LONGEST = 512  # tokens


def spec(folder: Path, labels: tuple[str, ...] | None = None) -> PredictorSpec:
    return PredictorSpec(
        name="tiny",
        source=str(folder),
        architecture=None,
        head=None,
        revision=None,
        labels=labels,
        dtype="float32",
        device="cpu",
        cache=str(folder.parent),
        max_pixels=1,
    )


async def classify(worker: TransformerWorker, *texts: str, truncate: bool = False, listed: bool = True) -> Classes:
    answer = await worker.predict(TextInput(texts, listed, truncate))
    assert isinstance(answer, Classes)
    return answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_classifier(tmp_path_factory.mktemp("classifier") / "tiny-bert")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(folder: Path) -> AsyncIterator[TransformerWorker]:
    worker = TransformerWorker(spec(folder), 1, _CONFIG)
    await worker.load()
    yield worker
    await worker.unload()


def texts_of(tokenizer: Tokenizer, lengths: list[int]) -> list[str]:
    """Of exactly so many tokens each."""
    rng = random.Random(0)  # noqa: S311
    texts = []
    for length in lengths:
        text = ""
        while (count := len(tokenizer.encode(text).ids)) != length:
            text = text + rng.choice("abcdefghijk 0123456789") if count < length else ""
        texts.append(text)
    return texts


async def test_a_texts_answer_is_transformers_and_does_not_depend_on_its_list(
    worker: TransformerWorker, folder: Path, tokenizer: Tokenizer
) -> None:
    texts = texts_of(tokenizer, [*range(3, 20), 33, 64, 65, 100, 101, 127, 200, 201, 256, 300, 390, 400, _LONGEST])
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        expected = [model(torch.tensor([tokenizer.encode(text).ids])).logits.softmax(-1)[0].tolist() for text in texts]
    assert len({round(row[0], 4) for row in expected}) > 5  # they tell texts apart
    alone = [(await classify(worker, text)).probabilities[0] for text in texts]
    together = (await classify(worker, *texts)).probabilities
    order = random.Random(1).sample(range(len(texts)), len(texts))  # noqa: S311
    shuffled = (await classify(worker, *(texts[i] for i in order))).probabilities
    concurrent = await asyncio.gather(*(classify(worker, text) for text in texts))
    for i, row in enumerate(expected):
        for found in (alone[i], together[i], shuffled[order.index(i)], concurrent[i].probabilities[0]):
            assert found == pytest.approx(row, abs=1e-5)
            assert sum(found) == pytest.approx(1, abs=1e-5)


async def test_labels_are_the_models_or_the_catalogues(worker: TransformerWorker, folder: Path) -> None:
    assert worker.labels == ("HAM", "SPAM")
    named = TransformerWorker(spec(folder, ("good", "bad")), 1, _CONFIG)
    await named.load()
    assert named.labels == ("good", "bad")
    await named.unload()
    too_many = TransformerWorker(spec(folder, ("a", "b", "c")), 1, _CONFIG)
    with pytest.raises(ModelUnavailable, match="has 2 classes, and the catalogue names 3"):
        await too_many.load()


async def test_a_text_that_is_too_long_is_refused_by_its_place_and_cut_only_when_asked(
    worker: TransformerWorker, tokenizer: Tokenizer
) -> None:
    [fits, long] = texts_of(tokenizer, [_LONGEST, _LONGEST + 1])
    with pytest.raises(InvalidRequest, match=r"input_data\[1\] has 513 tokens, and the model reads 512") as refused:
        await classify(worker, "short", long)
    assert refused.value.param == "input_data[1]"
    with pytest.raises(InvalidRequest, match=r"input_data has 513 tokens"):
        await classify(worker, long, listed=False)
    cut = await classify(worker, fits, long, truncate=True)
    assert cut.truncated == (False, True)
    whole, *_ = texts_of(tokenizer, [_LONGEST])
    assert (await classify(worker, whole)).truncated == (False,)
    assert (await classify(worker)).probabilities == ()
    assert len((await classify(worker, "")).probabilities) == 1


async def test_a_refused_request_spoils_nobody_elses(worker: TransformerWorker, tokenizer: Tokenizer) -> None:
    [long] = texts_of(tokenizer, [_LONGEST + 1])
    good, bad = await asyncio.gather(classify(worker, "fine"), classify(worker, long), return_exceptions=True)
    assert isinstance(good, Classes)
    assert isinstance(bad, InvalidRequest)


@pytest.mark.parametrize("replicas", [1, 2])
async def test_a_process_that_is_killed_is_told_and_leaves_nothing(folder: Path, replicas: int) -> None:
    worker = TransformerWorker(spec(folder), replicas, _CONFIG)
    handles = len(os.listdir("/proc/self/fd"))
    doomed = TransformerWorker(spec(folder), replicas, _CONFIG)
    await doomed.load()
    pids = [replica.pid for replica in doomed._replicas]
    assert len(pids) == replicas
    assert pids[0] is not None
    os.kill(pids[0], signal.SIGSTOP if replicas == 1 else signal.SIGKILL)
    if replicas == 1:  # a request is in its hands
        asking = asyncio.create_task(classify(doomed, "a"))
        await asyncio.sleep(0.05)
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(WorkerDied):
            await asking
    await asyncio.wait_for(doomed.died(), 5)
    with pytest.raises(WorkerDied):
        await classify(doomed, "a")
    await doomed.unload()
    assert not any(psutil.pid_exists(pid) for pid in pids if pid)
    await worker.unload()
    assert len(os.listdir("/proc/self/fd")) <= handles


async def test_what_it_takes_is_measured_and_returns(folder: Path) -> None:
    worker = TransformerWorker(spec(folder), 1, _CONFIG)
    await worker.load()
    size = (folder / "model.safetensors").stat().st_size
    assert size < await worker.measure() < size + (200 << 20)
    await worker.unload()
    assert await worker.measure() == 0
    await worker.unload()


async def test_what_can_not_be_loaded_says_why(folder: Path, tmp_path: Path) -> None:
    broken = text_classifier(tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    for source, reason in ((broken, "can't be loaded"), (tmp_path, "can't be loaded")):
        worker = TransformerWorker(spec(source), 1, _CONFIG)
        with pytest.raises(ModelUnavailable, match=reason):
            await worker.load()
