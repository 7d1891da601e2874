"""docs/options.md says what the settings of a server are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bifolio.config import SETTINGS, variable_of

ROOT = Path(__file__).parents[1]
TOOL = ROOT / "tools" / "options_table.py"


def test_the_page_of_options_is_the_one_that_the_settings_make() -> None:
    check = [sys.executable, str(TOOL), "--check"]
    result = subprocess.run(check, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_each_setting_has_a_row_with_its_key_and_its_variable() -> None:
    rows = [line.split(" | ") for line in (ROOT / "docs/options.md").read_text().splitlines()]
    shown = {row[1]: row[2] for row in rows if len(row) > 2}
    for key, (setting, _) in SETTINGS.items():
        variable = "–" if setting.table else f"`{variable_of(key)}`"
        assert shown[f"`{setting.singular or key}`"] == variable


def test_no_two_settings_share_a_variable() -> None:
    assert len({variable_of(key) for key in SETTINGS}) == len(SETTINGS)
