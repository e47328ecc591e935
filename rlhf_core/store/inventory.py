"""What lies in a store: stages, keys, manifests."""

from collections.abc import Iterator

from rlhf_core.store.artifacts import read_manifest
from rlhf_core.store.backends import StoreError
from rlhf_core.store.manifest import Manifest
from rlhf_core.store.store import Store


def stage_keys(store: Store, top: str) -> list[tuple[str, str]]:
    """(stage, key) of every directory below `top`, which is artifacts or training."""
    return [(stage, key) for stage in store.list_names(top) for key in store.list_names(f"{top}/{stage}")]


def published(store: Store, stage: str) -> Iterator[Manifest]:
    """The manifests of a stage's artifacts. One that cannot be read is left out: `verify` names it."""
    for key in store.list_names(f"artifacts/{stage}"):
        try:
            manifest = read_manifest(store, stage, key)
        except StoreError:
            continue
        if manifest is not None:
            yield manifest


def find_artifact(store: Store, wanted: str) -> Manifest:
    """The one artifact that `wanted` names: stage/key, or the beginnings of both or of the key alone (ppo/3f2a, 3f2a).

    Raises StoreError where there is none, or several.
    """
    stage_start, slash, key_start = wanted.rpartition("/")
    found = [
        (stage, key)
        for stage, key in stage_keys(store, "artifacts")
        if key.startswith(key_start) and (stage == stage_start if slash else True)
    ]
    manifests = [manifest for stage, key in found if (manifest := read_manifest(store, stage, key)) is not None]
    if not key_start or not manifests:
        raise StoreError(
            f"no artifact {wanted!r} in store {store.url!r}; give stage/key, or the first digits of a key that "
            "`rlhf plan` or a report shows"
        )
    if len(manifests) > 1:
        names = ", ".join(f"{manifest.stage}/{manifest.key[:12]}" for manifest in manifests[:5])
        raise StoreError(f"{wanted!r} is the beginning of {len(manifests)} artifacts ({names}); give more digits")
    return manifests[0]
