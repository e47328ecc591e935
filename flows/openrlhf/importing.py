"""An OpenRLHF command line as the text of a pipeline file, with notes on what has no counterpart."""

import textwrap
from dataclasses import dataclass
from typing import Any

import yaml

from flows.openrlhf.arguments import Arguments, Note, read_arguments
from flows.openrlhf.flags import COMMANDS
from flows.openrlhf.rl import reinforcement
from flows.openrlhf.shell import CommandLine
from flows.openrlhf.supervised import supervised
from rlhf_core.config.base import SettingsError, parse_settings
from rlhf_core.config.pipeline import PipelineSettings
from rlhf_core.training.capabilities import check_combination

_WIDTH = 120


@dataclass(frozen=True)
class Imported:
    """values: what differs from our defaults, in the order of the settings."""

    command: str
    values: dict[str, Any]
    notes: tuple[Note, ...]

    def yaml(self) -> str:
        """The pipeline file: the notes as comments, then a section after the other."""
        lines = [f"# From openrlhf.cli.{self.command}, by `rlhf import-flags`."]
        for note in self.notes:
            lines += textwrap.wrap(
                str(note), _WIDTH, initial_indent="# - ", subsequent_indent="#   ", break_long_words=False
            )
        style: dict[str, Any] = {"sort_keys": False, "default_flow_style": None, "width": _WIDTH, "allow_unicode": True}
        sections = [yaml.safe_dump({name: value}, **style) for name, value in self.values.items()]
        return "\n".join(["\n".join(lines) + "\n", *sections])


def import_command(line: CommandLine, prompts: int | None = None) -> Imported:
    """Raises SettingsError, one line, for a flag that the command does not have and for values that are refused here.

    prompts: how many prompts train_ppo_ray's data set has.
    """
    arguments = read_arguments(COMMANDS[line.name], line.words)
    in_rl = line.name == "train_ppo_ray"
    values = reinforcement(arguments, prompts) if in_rl else supervised(arguments, line.ranks)
    try:
        settings = parse_settings(PipelineSettings, values)
    except SettingsError as error:
        raise SettingsError(f"{line.name}: what its flags mean here is refused: {error}") from None
    _note_refusals(arguments, settings)
    differing = settings.model_dump(mode="json", exclude_defaults=True)
    section = differing[COMMANDS[line.name].section]
    if section.get("epochs") == arguments["train.max_epochs"]:
        section["epochs"] = arguments["train.max_epochs"]  # 2 and not 2.0
    return Imported(line.name, differing, tuple(arguments.notes))


def _note_refusals(arguments: Arguments, settings: PipelineSettings) -> None:
    """A note where the stage would refuse to start: what OpenRLHF combines and DeepSpeed's trainers here do not."""
    section = COMMANDS[arguments.command.name].section
    try:
        check_combination(getattr(settings, section))
    except SettingsError as error:
        arguments.remark(section, f"refuses to start as it stands: {error}")
