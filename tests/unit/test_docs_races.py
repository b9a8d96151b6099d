"""docs/races.md has every mutation, what each one shows, and files that exist."""

from __future__ import annotations

import re
from pathlib import Path

from tests.unit import test_race_mutations, test_race_tensors, test_races

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "races.md").read_text(encoding="utf-8")
ROWS = {
    cells[0].removesuffix(" (T)"): (cells[0].endswith(" (T)"), cells[-1].split(":")[0])
    for cells in (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in TEXT.splitlines()
        if line.startswith("| ") and line.count("|") == 6
    )
    if cells[0] != "name in the tests"
}


def test_every_mutation_is_a_row_and_every_row_a_mutation() -> None:
    mutations = test_race_mutations.LOOP | test_race_mutations.LANE
    assert list(ROWS) and ROWS.keys() == mutations.keys()
    for name, (on_tensors, wrong) in ROWS.items():
        assert on_tensors is (name in test_race_tensors.MUTATIONS), name
        assert wrong == ("yes" if mutations[name].adversary is not None else "no"), name
    assert test_race_tensors.MUTATIONS.keys() <= mutations.keys()


def test_files_and_numbers_are_right_and_the_readme_leads_here() -> None:
    files = re.findall(r"`((?:docs|scripts|tests|zos_sglang)/[\w./-]+)`", TEXT)
    assert files and [name for name in files if not (ROOT / name).exists()] == []
    assert "(docs/races.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    told = [int(n) for n in re.findall(r"\((\d+) runs\)", TEXT)]
    of_tensors = test_race_tensors.RUNS.max_examples
    assert told == [3 * test_races.EXAMPLES.max_examples, of_tensors]
