"""Finds the training command in a shell script, or in the words of a command line, as far as such scripts go.

Continued lines, comments, quotes, here-documents, and variables and arrays that the script itself sets are read;
nothing is run.
"""

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from flows.openrlhf.flags import COMMANDS
from rlhf_core.config.base import SettingsError

_COMMAND = re.compile(r"(?:^|[./])cli[./](train_\w+?)(?:\.py)?$")
_IN_TEXT = re.compile(r"openrlhf[./]cli[./](train_\w+)")
_SCALAR = re.compile(r"^\s*(?:export\s+|local\s+)?([A-Za-z_]\w*)=(?!\()(.*)$")
_ARRAY = re.compile(r"^\s*(?:export\s+|local\s+)?([A-Za-z_]\w*)\+?=\(", re.MULTILINE)
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?:\[[@*]\])?(?::?-([^}]*))?\}|\$([A-Za-z_]\w*)")
_ANSI = re.compile(r"\$'((?:[^'\\]|\\.)*)'")
_RANKS = {
    "nproc-per-node": "processes",
    "nproc_per_node": "processes",
    "num_gpus": "processes",
    "nnodes": "nodes",
    "num_nodes": "nodes",
}


@dataclass(frozen=True)
class CommandLine:
    """name: of COMMANDS. words: its arguments. ranks: what the launcher says, None where it takes every accelerator."""

    name: str
    words: tuple[str, ...]
    ranks: int | None = None


def from_words(words: Sequence[str]) -> CommandLine:
    """Words as a shell hands them over: `deepspeed --module openrlhf.cli.train_sft --max_len 2048`."""
    if words and words[0] in COMMANDS:
        return CommandLine(words[0], tuple(words[1:]))
    for position, word in enumerate(words):
        match = _COMMAND.search(word)
        if match:
            return CommandLine(_known(match[1]), tuple(words[position + 1 :]), _ranks(words[:position]))
    raise SettingsError(f"no training command among the words; give {_ways()}")


def from_script(text: str) -> CommandLine:
    """The one training command of a script."""
    lines = _logical_lines(text)
    variables: dict[str, str] = _arrays(text)
    found: list[CommandLine] = []
    for line in lines:
        scalar = _SCALAR.match(line)
        if _IN_TEXT.search(line):
            found.append(from_words(_words(_expanded(line, variables))))
        elif scalar and "$(" not in scalar[2] and "`" not in scalar[2]:
            variables[scalar[1]] = _expanded(_value(scalar[2]), variables)
    if not found:
        raise SettingsError(f"the script holds no training command; it wants {_ways()}")
    if len(found) > 1:
        names = ", ".join(one.name for one in found)
        raise SettingsError(f"the script holds {len(found)} training commands ({names}); give one at a time")
    (one,) = found
    # In a here-document the command stands apart from its launcher.
    return one if one.ranks is not None else CommandLine(one.name, one.words, _ranks(_launchers(lines, variables)))


def from_arguments(arguments: Sequence[str]) -> CommandLine:
    """A command's words, or the name of a file that holds a script; of standard input, where it is `-` or nothing."""
    if list(arguments) in ([], ["-"]):
        return from_script(sys.stdin.read())
    if len(arguments) == 1 and arguments[0] not in COMMANDS:
        try:
            return from_script(Path(arguments[0]).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"script {arguments[0]} cannot be read: {error}") from None
    return from_words(arguments)


def _known(name: str) -> str:
    if name not in COMMANDS:
        raise SettingsError(f"{name} is no command that is read here; these are: {', '.join(COMMANDS)}")
    return name


def _ways() -> str:
    return "openrlhf.cli.<command> with its flags, of which <command> is one of " + ", ".join(COMMANDS)


def _logical_lines(text: str) -> list[str]:
    """Lines with their continuations; a comment ends a line, whatever it ends with."""
    lines, open_line = [], ""
    for line in text.splitlines():
        stripped = line.rstrip()
        if stripped.lstrip().startswith("#"):
            lines.append(open_line)
            open_line = ""
        elif stripped.endswith("\\"):
            open_line += f"{stripped[:-1]} "
        else:
            lines.append(open_line + stripped)
            open_line = ""
    return [line for line in [*lines, open_line] if line.strip()]


def _value(text: str) -> str:
    """The first word behind a `NAME=`, without its quotes."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        return text
    return words[0] if words else ""


def _arrays(text: str) -> dict[str, str]:
    """NAME=( ... ) -> its words, in their quotes, with variables as they stand; NAME+=( ... ) adds some."""
    arrays: dict[str, list[str]] = {}
    for match in _ARRAY.finditer(text):
        words = arrays.setdefault(match[1], [])
        for line in text[match.end() :].splitlines():
            found = list(takewhile(lambda word: not word.startswith("#"), _lexer(line, "()", posix=False)))
            words += takewhile(lambda word: word != ")", found)
            if ")" in found:
                break
    return {name: " ".join(words) for name, words in arrays.items()}


def _expanded(text: str, variables: dict[str, str]) -> str:
    """`text` with the variables that the script sets; others stay as they are, or become their `:-default`."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        if name in variables:
            return variables[name]
        return match[0] if match[2] is None else match[2]

    text = re.sub(r'"(\$\{\w+\[@\]\})"', r"\1", text)  # a quoted array is a word for each of its own
    for _ in range(10):  # values may name further variables
        changed = _VARIABLE.sub(value, text)
        if changed == text:
            break
        text = changed
    return text


def _words(line: str) -> list[str]:
    """The words of a line up to what ends a command: `;`, `&&`, `|`, a redirection."""
    plain = re.sub(r"(?<=\s)\d(?=>)", "", line)  # the number of a redirected stream, as in 2>&1
    ansi = _ANSI.sub(lambda match: shlex.quote(match[1].encode().decode("unicode_escape")), plain)
    words: list[str] = []
    try:
        for word in _lexer(ansi, ";&|<>", posix=True):
            if word.startswith("#"):
                break
            if word and set(word) <= set(";&|<>"):
                if any(_COMMAND.search(one) for one in words):
                    break
                words.clear()
            else:
                words.append(word)
    except ValueError as error:
        raise SettingsError(f"the command cannot be split into words: {error}; check its quotes") from None
    return words


def _lexer(text: str, operators: str, *, posix: bool) -> shlex.shlex:
    lexer = shlex.shlex(text, posix=posix, punctuation_chars=operators)
    lexer.whitespace_split = True
    lexer.commenters = ""  # shlex would see a comment within a word too
    return lexer


def _launchers(lines: list[str], variables: dict[str, str]) -> list[str]:
    """The words of the lines that start a program on several processes."""
    started = [line for line in lines if re.search(r"\b(torchrun|deepspeed|accelerate)\b", line)]
    return [word for line in started for word in _expanded(line, variables).split()]


def _ranks(words: Sequence[str]) -> int | None:
    """Processes x nodes, where the launcher says a number of processes."""
    counts = {"processes": None, "nodes": 1}
    for position, word in enumerate(words):
        name, sign, attached = word.lstrip("-").partition("=")
        value = attached if sign else next(iter(words[position + 1 : position + 2]), "")
        if word.startswith("-") and name in _RANKS and value.isdigit():
            counts[_RANKS[name]] = int(value)
    return None if counts["processes"] is None else counts["processes"] * counts["nodes"]
