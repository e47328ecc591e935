"""Random command lines: the pipeline loads, and no flag is lost."""

from hypothesis import given, settings
from hypothesis import strategies as st
from openrlhf_flags import NEEDED, all_spellings, imported, values_of

from flows.openrlhf.flags import COMMANDS

_CHOICES = {
    command: {
        spelling: [values_of(COMMANDS[command].flags[names[0]])]
        + [[choice] for choice in COMMANDS[command].flags[names[0]].choices]
        for spelling, names in all_spellings(command).items()
    }
    for command in COMMANDS
}


@st.composite
def command_lines(draw: st.DrawFn) -> tuple[str, dict[str, list[str]]]:
    """(command, spelling -> values); no flag is given by two spellings."""
    command = draw(st.sampled_from(sorted(COMMANDS)))
    named = all_spellings(command)
    given_flags: dict[str, list[str]] = {}
    taken: set[str] = set()
    for spelling in draw(st.lists(st.sampled_from(sorted(named)), max_size=25, unique=True)):
        if not taken & set(named[spelling]):
            taken |= set(named[spelling])
            given_flags[spelling] = draw(st.sampled_from(_CHOICES[command][spelling]))
    return command, given_flags


def _is_default(command: str, spelling: str, values: list[str]) -> bool:
    return all(
        COMMANDS[command].flags[name].default == (values[0] if len(values) == 1 else None)
        for name in all_spellings(command)[spelling]
    )


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(command_lines())
def test_a_random_command_line_loads_and_loses_no_flag(line: tuple[str, dict[str, list[str]]]):
    command, flags = line
    named = all_spellings(command)
    needed = [name for spelling in flags for name in named[spelling] if name in NEEDED[command]]
    whole = imported(command, flags, without=needed)  # parse_settings has taken what it made of them
    noted = {note.flag for note in whole.notes}
    for spelling, values in flags.items():
        if f"--{spelling}" in noted or _is_default(command, spelling, values):
            continue
        others = {name: value for name, value in flags.items() if name != spelling}
        rest = [name for name in needed if name not in named[spelling]]
        less = imported(command, others, without=rest)
        # Another value, or another flag's note: k1 in the loss, the default, becomes k2 as well, with a note.
        assert (less.values, set(less.notes)) != (whole.values, set(whole.notes)), spelling
