import json
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.store.artifacts import publish
from rlhf_core.store.inventory import find_artifact
from rlhf_core.store.keys import stage_key
from rlhf_core.store.lineage import find_manifest, lineage, to_svg
from rlhf_core.store.manifest import Manifest
from rlhf_core.store.store import Store, StoreError

FOREIGN = "0123456789abcdef0123456789abcdef01234567"


def artifact(store: Store, stage: str, inputs: dict[str, str], **fields: Any) -> Manifest:
    key = stage_key(stage=stage, version=1, settings={}, inputs=inputs, data={}, code={}, salt=str(fields))
    with tempfile.TemporaryDirectory() as temp:
        Path(temp, "model").mkdir()
        Path(temp, "model", "config.json").write_text("{}")
        given = {"stage": stage, "key": key.key, "key_source": key.source, "inputs": inputs, **fields}
        return publish(store, local_dir=temp, manifest_fields=given, lease=None)


@pytest.fixture
def chain(tmp_path: Path) -> tuple[Store, dict[str, Manifest]]:
    """Data -> sft -> rm -> ppo; sft started from a model of the hub, and ppo reads sft too."""
    store = Store(str(tmp_path / "store"))
    made = {"data": artifact(store, "prepare-data", {}, data={"dataset": "sft"}, metrics={"rows": 12})}
    made["sft"] = artifact(store, "sft", {"data": made["data"].key, "model": FOREIGN}, metrics={"last_loss": 0.25})
    made["rm"] = artifact(store, "rm", {"model": made["sft"].key}, metrics={"eval/accuracy": 0.968})
    made["ppo"] = artifact(store, "ppo", {"policy": made["sft"].key, "reward": made["rm"].key})
    artifact(store, "dpo", {"model": made["sft"].key})
    return store, made


def test_every_manifest_on_the_way_and_no_other(chain: tuple[Store, dict[str, Manifest]]):
    store, made = chain
    shown = json.loads(json.dumps(lineage(store, made["ppo"]).to_json()))
    names = {name: f"{manifest.stage}/{manifest.key}" for name, manifest in made.items()}
    assert shown["artifact"] == names["ppo"]
    assert set(shown["artifacts"]) == set(names.values())
    assert shown["artifacts"][names["sft"]]["key_source"] == made["sft"].key_source
    assert shown["outside"] == [FOREIGN]
    assert {(edge["from"], edge["to"], edge["input"]) for edge in shown["edges"]} == {
        (names["sft"], names["ppo"], "policy"),
        (names["rm"], names["ppo"], "reward"),
        (names["sft"], names["rm"], "model"),
        (names["data"], names["sft"], "data"),
        (FOREIGN, names["sft"], "model"),
    }


def test_the_picture_has_a_box_for_each_from_left_to_right(chain: tuple[Store, dict[str, Manifest]]):
    store, made = chain
    root = ET.fromstring(to_svg(lineage(store, made["ppo"])))
    svg = "{http://www.w3.org/2000/svg}"
    at = {text.text: float(text.attrib["x"]) for text in root.iter(f"{svg}text")}
    assert at["prepare-data (sft)"] == at["from outside"] < at["sft"] < at["rm"] < at["ppo"]
    assert {made["ppo"].key[:12], "eval/accuracy 0.968", "last_loss 0.25", "rows 12"} <= at.keys()
    boxes = [one for one in root.iter(f"{svg}rect") if "rx" in one.attrib]
    corners = {(float(one.attrib["x"]), float(one.attrib["y"])) for one in boxes}
    assert len(corners) == len(boxes) == 5
    assert len(list(root.iter(f"{svg}path"))) == 5 + 1  # edges, and the arrows' tip
    assert max(x for x, _ in corners) + 210 < float(root.attrib["width"])


def test_an_artifact_is_found_by_its_key_and_by_its_directory(chain: tuple[Store, dict[str, Manifest]], tmp_path: Path):
    store, made = chain
    ppo = made["ppo"]
    assert find_artifact(store, f"ppo/{ppo.key[:10]}") == find_artifact(store, ppo.key[:10]) == ppo
    model = Path(store.url, "artifacts", "ppo", ppo.key, ppo.attempt, "model")
    found_in, found = find_manifest(str(model), Store(str(tmp_path / "another")))
    assert (found_in.url, found) == (store.url, ppo)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [("ppo/ffff", "no artifact 'ppo/ffff' in store"), ("", "no artifact ''"), ("ppo/", "no artifact 'ppo/'")],
)
def test_what_is_not_there_is_one_line(chain: tuple[Store, dict[str, Manifest]], wanted: str, message: str):
    with pytest.raises(StoreError) as caught:
        find_artifact(chain[0], wanted)
    assert str(caught.value).startswith(message)


def test_a_beginning_of_several_keys_names_them(tmp_path: Path):
    store = Store(str(tmp_path / "store"))
    made = [artifact(store, "sft", {}, metrics={"n": n}) for n in range(17)]
    digit = next(d for d in "0123456789abcdef" if sum(m.key.startswith(d) for m in made) > 1)
    with pytest.raises(StoreError, match=r"is the beginning of \d+ artifacts \(sft/.*give more digits"):
        find_artifact(store, f"sft/{digit}")


def test_a_directory_without_a_manifest_is_refused(tmp_path: Path):
    with pytest.raises(StoreError, match=r"has no manifest\.json of ours"):
        find_manifest(str(tmp_path), Store(str(tmp_path)))
