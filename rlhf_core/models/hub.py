"""Models of the Hugging Face hub: the commit that a revision stands for, and the files of a commit on this node.

The token of gated and private models is the environment's HF_TOKEN. Loads without torch.
"""

from pathlib import Path

from rlhf_core.config.base import SettingsError

# Weights, configuration and tokenizer, at the top of the repository. Nothing that is unpickled or run.
_WANTED = ("*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
_UNWANTED = ("*/*", "consolidated*")  # other formats of the same weights
# The end of every message of a model that cannot be had.
INSTEAD = (
    "give a model of the hub, HF_TOKEN in the environment for a gated one, a commit as `revision` and a filled cache "
    "where the hub is out of reach, or a `path`"
)
_PARTS = {
    "config.json": ("config.json",),
    "weights (*.safetensors)": ("*.safetensors",),
    "tokenizer.json": ("tokenizer.json", "tokenizer.model"),
}


def missing_part(directory: Path) -> str | None:
    """What a Hugging Face model directory lacks so that no engine could load it; None where it is complete."""
    for part, patterns in _PARTS.items():
        if not any(any(directory.glob(pattern)) for pattern in patterns):
            return part
    return None


def model_commit(name: str, revision: str | None) -> str:
    """The commit that a branch or tag of a model stands for; a whole commit is itself, without a request.

    Raises OSError or ValueError where the hub cannot be asked or does not know it.
    """
    if revision is not None and len(revision) == 40 and set(revision) <= set("0123456789abcdef"):
        return revision
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

    try:
        commit = HfApi().model_info(name, revision=revision).sha
    except HTTPError as error:  # of the client's transport, e.g. a refused connection, which is no OSError
        raise ConnectionError(" ".join(str(error).split())) from error
    if commit is None:
        raise ValueError(f"the hub gives no commit for {name}")
    return commit


def fetch_model(name: str, revision: str | None) -> Path:
    """A directory with a model's files in this node's Hugging Face cache; what is missing there is downloaded.

    A whole commit that is in the cache takes no request. Several processes may ask at once. Raises SettingsError.
    """
    from huggingface_hub import snapshot_download

    try:
        commit = model_commit(name, revision)
        kept = snapshot_download(name, revision=commit, allow_patterns=list(_WANTED), ignore_patterns=list(_UNWANTED))
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"model {name} of the hub cannot be read: {' '.join(str(error).split())}; {INSTEAD}"
        ) from error
    missing = missing_part(Path(kept))
    if missing is not None:
        raise SettingsError(f"model {name} of the hub has no {missing} at commit {commit}; give a complete model")
    return Path(kept)
