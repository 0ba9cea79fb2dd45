"""/predict and /models on the service's own model: what is taken, what is refused by name."""

import pytest

from llm.sequence import SamplingParams
from tests.unit.engine_for_tests import ScriptedEngine
from tests.unit.http_for_tests import Client

NAME = "Scripted-1M"


async def test_the_services_own_model_is_listed_and_answers_by_id_and_name(client: Client, engine: ScriptedEngine) -> None:
    listed = (await client.get("/models")).json
    [own] = listed["available_models"]
    assert (own["name"], own["framework"], own["state"]) == (NAME, "quartet", "unloaded")
    for model in (NAME, own["id"]):
        answer = (await client.post("/predict", {"model_id": model, "input_data": "a b"})).json
        assert answer == {"model_id": own["id"], "model_version": "1", "predictions": [" a b"]}
    several = {"model_id": NAME, "input_data": ["a", "b c"], "parameters": {"max_tokens": 3, "return_full_text": True}}
    assert (await client.post("/predict", several)).json["predictions"] == ["a a", "b c b c"]
    assert engine.requests[-1].params == SamplingParams(max_tokens=3)
    assert (await client.post("/predict", {"model_id": NAME, "input_data": []})).json["predictions"] == []
    shown = (await client.get(f"/models/{NAME}")).json
    assert (shown["state"], shown["pinned"], shown["in_use"]) == ("ready", True, 0)
    assert (await client.get("/models")).json["loaded_models"] == [own["id"]]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model_id": "nope", "input_data": "a"}, 404, "model_id"),
        ({"model_id": NAME, "input_data": "a", "inputs": 1}, 422, "inputs"),
        ({"model_id": NAME}, 422, "input_data"),
        ({"model_id": NAME, "input_data": 5}, 422, "input_data"),
        ({"model_id": NAME, "input_data": None}, 422, "input_data"),
        ({"model_id": NAME, "input_data": {"text": "a"}}, 422, "input_data"),
        ({"model_id": NAME, "input_data": ["a", ["b"]]}, 422, "input_data[1]"),
        ({"model_id": NAME, "input_data": ["a"] * 9}, 422, "input_data"),
        ({"model_id": NAME, "input_data": "a", "truncate": True}, 422, "truncate"),
        ({"model_id": NAME, "input_data": "a", "top_k": 2}, 422, "top_k"),
        ({"model_id": NAME, "input_data": "a", "timeout": 1000}, 422, "timeout"),
        ({"model_id": NAME, "input_data": "a", "parameters": {"model": "x"}}, 422, "parameters.model"),
        ({"model_id": NAME, "input_data": "a", "parameters": {"temperature": -1}}, 422, "parameters.temperature"),
    ],
)
async def test_what_is_wrong_is_named(client: Client, engine: ScriptedEngine, body: object, status: int, param: str) -> None:
    answer = await client.post("/predict", body)
    assert (answer.status, answer.error["param"]) == (status, param)
    assert engine.requests == []


async def test_the_services_own_model_stays(client: Client) -> None:
    for answer in (
        await client.post(f"/models/{NAME}/unload", b""),
        await client.post("/models/nope/unload", b""),
        await client.post("/models/nope/load", b""),
    ):
        assert answer.status in {404, 422}
    assert (await client.post(f"/models/{NAME}/load", b"")).json["state"] == "ready"
