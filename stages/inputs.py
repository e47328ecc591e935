"""What a stage reads from outside the store: fingerprints for its key, compared again when it is read."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rlhf_core.config.base import SettingsError
from rlhf_core.config.data import DataSource
from rlhf_core.config.rl import PpoSettings
from rlhf_core.config.sampling import SampleSettings
from rlhf_core.config.supervised import DpoSettings, KtoSettings, SupervisedSettings, TextSettings
from rlhf_core.config.training import ModelSource
from rlhf_core.data.arithmetic import GENERATOR_VERSION
from rlhf_core.data.sources import hub_commit
from rlhf_core.models.hub import INSTEAD, fetch_model, missing_part, model_commit
from rlhf_core.store.keys import directory_digest, file_fingerprint, remote_fingerprint


def data_fingerprints(kind: str, data: DataSource) -> dict[str, str]:
    """Setting below data.<kind> -> fingerprint of what it names: content, commit, or the generator's version.

    A loader's fingerprint is that of its file. Raises SettingsError for what cannot be read.
    """
    prints: dict[str, str] = {}
    for prefix, source in data.named_parts:
        where = f"data.{kind}.{prefix}"
        if source.arithmetic is not None:
            prints[f"{prefix}generator"] = f"arithmetic-{GENERATOR_VERSION}"
        for name, url in (("path", source.path), ("eval_path", source.eval_path)):
            if url is not None:
                with _readable(f"{where}{name}", f"file {url}", "give the path or s3:// URL of a data file"):
                    prints[f"{prefix}{name}"] = remote_fingerprint(url)
        for beside, hub, revision in (
            ("", source.hub, source.revision),
            ("eval_", source.eval_hub, source.eval_revision),
        ):
            if hub is not None:
                instead = (
                    f"give a data set of the hub, a commit as `{beside}revision` where the hub is out of reach, or "
                    f"`{beside}path`"
                )
                with _readable(f"{where}{beside}hub", f"data set {hub}", instead):
                    prints[f"{prefix}{beside}hub"] = hub_commit(hub, revision)
    return prints


def foreign_models(section: str, settings: SupervisedSettings) -> dict[str, str]:
    """Input name -> fingerprint of each model from outside that a supervised stage's settings name: a directory's
    content digest, or a commit of the hub.

    Empty for a model from scratch, whose settings say all. Raises SettingsError for what cannot be had.
    """
    prints: dict[str, str] = {}
    for name, source in _model_sources(settings).items():
        if source.path is not None:
            prints[name] = _model_digest(f"{section}.{name}.path", source.path)
        elif source.hub is not None:
            with _readable(f"{section}.{name}.hub", f"model {source.hub}", INSTEAD):
                prints[name] = model_commit(source.hub, source.revision)
    return prints


def pinned(settings: SupervisedSettings, prints: Mapping[str, str]) -> SupervisedSettings:
    """The settings with each model of the hub at the commit that `foreign_models` found, wherever its branch moves."""
    sources = _model_sources(settings)
    at_commit = {
        name: source.model_copy(update={"revision": prints[name]}) for name, source in sources.items() if source.hub
    }
    return settings.model_copy(update=at_commit)


def fetch_hub_models(settings: SupervisedSettings) -> None:
    """Has every model of the hub in this node's cache: what the hub refuses is an error before ranks start, and those
    of this node find it there. Raises SettingsError."""
    for source in _model_sources(settings).values():
        if source.hub is not None:
            fetch_model(source.hub, source.revision)


def _model_sources(settings: SupervisedSettings) -> dict[str, ModelSource]:
    """Input name -> the source that the settings give for it."""
    sources = {"model": settings.model}
    if isinstance(settings, DpoSettings | KtoSettings):
        sources["reference"] = settings.reference
    return {name: source for name, source in sources.items() if source is not None}


def _model_digest(setting: str, path: str) -> str:
    with _readable(setting, path, "give a Hugging Face model directory"):
        check_model_directory(setting, path)
        return directory_digest(path)


def code_digests(section: str, settings: SupervisedSettings | PpoSettings | SampleSettings) -> dict[str, str]:
    """Setting -> SHA-256 of the user's file that it names: what decides what a row becomes, or what is rewarded."""
    digests: dict[str, str] = {}
    for name, (path, kind) in _user_files(settings).items():
        with _readable(f"{section}.{name}", f"file {path}", f"give the path of a {kind}"):
            digests[name] = file_fingerprint(path)
    return digests


def _user_files(settings: SupervisedSettings | PpoSettings | SampleSettings) -> dict[str, tuple[str, str]]:
    """Setting -> (path, what should be there)."""
    if isinstance(settings, SupervisedSettings):
        return _template_file("text", settings.text)
    reward = settings.reward
    files = {f"reward.functions.{one.name}": (one.path, "Python file") for one in reward.functions}
    if isinstance(settings, PpoSettings) and settings.ptx is not None:
        files |= _template_file("ptx.text", settings.ptx.text)
    if reward.json_schema is not None:
        files["reward.json_schema.path"] = (reward.json_schema.path, "JSON schema")
    return files


def _template_file(section: str, text: TextSettings) -> dict[str, tuple[str, str]]:
    template = text.chat_template
    return {} if template is None else {f"{section}.chat_template": (template, "Jinja file")}


@contextmanager
def _readable(setting: str, what: str, instead: str) -> Iterator[None]:
    """Whatever keeps `what` from being read becomes a SettingsError, one line, that names the setting."""
    try:
        yield
    except FileNotFoundError:
        raise SettingsError(f"{setting}: {what} does not exist; {instead}") from None
    except (OSError, ValueError, ImportError, *_s3_errors()) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise SettingsError(f"{setting}: {what} cannot be read: {why}; {instead} that this user can read") from error


def _s3_errors() -> tuple[type[Exception], ...]:
    """botocore's errors, which are no OSErrors. Imported where one may have been raised: most runs need no S3."""
    from botocore.exceptions import BotoCoreError, ClientError

    return BotoCoreError, ClientError


def check_model_directory(setting: str, path: str) -> None:
    """Refuses what no engine could load, before one starts."""
    if not Path(path).is_dir():
        raise SettingsError(f"{setting}: {path} is not a directory; give a Hugging Face model directory")
    missing = missing_part(Path(path))
    if missing is not None:
        raise SettingsError(f"{setting}: {path} has no {missing}; give a complete Hugging Face model directory")


def check_unchanged(where: str, now: dict[str, str], planned: dict[str, str]) -> None:
    """Refuses content that is not what the stage's key was made from: the artifact would not be what its key says.

    `planned` may hold more than `now`, e.g. the keys of input artifacts. Raises SettingsError.
    """
    for name, fingerprint in now.items():
        if planned.get(name) != fingerprint:
            raise SettingsError(
                f"{where}.{name} is not what this run was planned with: its fingerprint was "
                f"{str(planned.get(name))[:20]} and is {fingerprint[:20]}; start the run again"
            )
