"""A field, default or mark that changes, changes keys: the stage's version has to be raised with it.

After a wanted change: raise the stage's version, then run this file as a script to write the table anew.
"""

import json
from pathlib import Path

from rlhf_core.config.base import field_table
from stages.plan import STAGES

TABLE = Path(__file__).with_name("key_table.json")


def current() -> dict:
    return {
        name: {"version": stage.version, "fields": [list(row) for row in field_table(stage.settings)]}
        for name, stage in STAGES.items()
    }


def test_fields_defaults_and_marks_change_only_with_the_stage_version():
    committed = json.loads(TABLE.read_text())
    assert set(committed) == set(STAGES)
    for name, now in current().items():
        before = committed[name]
        changed = [row for row in now["fields"] if row not in before["fields"]]
        gone = [row for row in before["fields"] if row not in now["fields"]]
        assert now["version"] == before["version"], f"{name}: version raised; write the table anew (see above)"
        assert not changed + gone, f"{name}: changed {changed}, gone {gone}; raise its version, then the table"


if __name__ == "__main__":
    TABLE.write_text(json.dumps(current(), indent=1) + "\n")
