"""A command's words as values, with the notes that are taken while they are read."""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from flows.openrlhf.flags import Command, Flag, Kind
from flows.openrlhf.spellings import spellings
from rlhf_core.config.base import SettingsError


@dataclass(frozen=True)
class Note:
    """What the pipeline does not say, or says otherwise. `flag` as the command line spells it."""

    flag: str
    text: str

    def __str__(self) -> str:
        return f"{self.flag}: {self.text}"


@dataclass(frozen=True)
class Given:
    value: Any
    spelling: str


@dataclass
class Arguments:
    """The values of a command's flags by their newest names: given, or OpenRLHF's default."""

    command: Command
    given: dict[str, Given]
    notes: list[Note] = field(default_factory=list)

    def __getitem__(self, name: str) -> Any:
        return self.given[name].value if name in self.given else self.command.flags[name].default

    def __contains__(self, name: str) -> bool:
        """Whether the flag is on the command line."""
        return name in self.given

    def asked(self, name: str) -> Any:
        """The value on the command line, or None."""
        return self.given[name].value if name in self.given else None

    def spelt(self, name: str) -> str:
        return f"--{self.given[name].spelling if name in self.given else name}"

    def note(self, name: str, text: str) -> None:
        """A note on a flag that is given; on others there is nothing to say."""
        if name in self.given:
            self.say(name, text)

    def say(self, name: str, text: str) -> None:
        """A note on what the flag's value, be it the default, leads to."""
        note = Note(self.spelt(name), text)
        if note not in self.notes:
            self.notes.append(note)

    def remark(self, what: str, text: str) -> None:
        """A note on something that is no flag."""
        self.notes.append(Note(what, text))

    def refuse(self, name: str, text: str) -> SettingsError:
        return SettingsError(f"{self.spelt(name)} of {self.command.name}: {text}")


def read_arguments(command: Command, words: Iterable[str]) -> Arguments:
    """Raises SettingsError, one line that names flag and command, for what the command would not take."""
    known = spellings(command.name, command.flags)
    given: dict[str, Given] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise SettingsError(f"{command.name}: {word!r} belongs to no flag; quote values that have spaces")
        spelling, sign, attached = word[2:].partition("=")
        if spelling not in known:
            raise SettingsError(_unknown(command, spelling, known))
        values = [attached] if sign else _values(rest)
        for name in known[spelling]:
            given[name] = Given(_read(command, command.flags[name], spelling, values), spelling)
    return Arguments(command, given)


def _values(rest: list[str]) -> list[str]:
    """Takes the words up to the next flag off `rest`."""
    end = next((n for n, word in enumerate(rest) if word.startswith("--")), len(rest))
    values = rest[:end]
    del rest[:end]
    return values


def _unknown(command: Command, spelling: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(spelling, known, n=1)
    hint = f"did you mean --{near[0]}?" if near else "see docs/openrlhf-options.md for those that it has"
    return f"--{spelling}: {command.name} has no such flag; {hint}"


_WANTED: dict[Kind, tuple[range, str]] = {
    "flag": (range(1), "no value"),
    "int": (range(1, 2), "a whole number"),
    "float": (range(1, 2), "a number"),
    "str": (range(1, 2), "one value"),
    "pair": (range(2, 3), "two numbers"),
    "floats": (range(1, 3), "one number or two"),
    "words": (range(1000), "words"),
}


def _read(command: Command, known: Flag, spelling: str, values: list[str]) -> Any:
    number, wanted = _WANTED[known.kind]
    where = f"--{spelling} of {command.name}"
    if len(values) not in number:
        raise SettingsError(f"{where} wants {wanted} (given {' '.join(values) or 'none'})")
    try:
        value = _converted(known.kind, values)
    except ValueError:
        variable = " (a shell variable that the script does not set)" if _holds_variable(values) else ""
        raise SettingsError(f"{where} wants {wanted} (given {' '.join(values)}){variable}") from None
    if known.choices and value not in known.choices:
        raise SettingsError(f"{where} is one of {', '.join(known.choices)} (given {value})")
    return value


def _converted(kind: Kind, values: list[str]) -> Any:
    match kind:
        case "flag":
            return True
        case "int":
            return int(values[0])
        case "float":
            return float(values[0])
        case "pair" | "floats":
            return tuple(float(value) for value in values)
        case "words":
            return tuple(values)
        case _:
            return values[0]


def _holds_variable(values: list[str]) -> bool:
    return any(re.search(r"\$\{?\w", value) for value in values)
