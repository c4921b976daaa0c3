"""The documents against the code: named files, keys and tests exist, and generated pages are fresh.

What it is not: a judge of the prose.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from typer.main import get_command

from gspo.cli.commands import app
from gspo.cli.keys_table import STARTING_KEYS, markdown
from gspo.common.config.algorithm import AlgorithmConfig
from gspo.common.config.loading import parse_config
from gspo.common.config.presets import PRESETS, fitting_clip
from gspo.common.config.reference import explain
from gspo.common.config.schema import Config
from gspo.common.errors import InputError
from gspo.learner.assembly.rows import SCHEMA
from gspo.reward.functions.builtins.math_equivalence import compute_score
from tests.support.repository.source_files import ROOT, fail_with, place, text_of

DOCUMENTS = [
    ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
] + sorted(ROOT.glob("docs/*.md"))
# `make bench` writes it.
MEASURED = ROOT / "docs/benchmarks.md"
GENERATED = "<!-- Below this line: the output of gspo config --markdown -->\n"
SECTIONS = "|".join(name for name in Config.model_fields if name not in ("name", "seed"))


def fenced(document: Path, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(document), re.MULTILINE | re.DOTALL)


def quoted(document: Path) -> set[str]:
    """Everything between backticks."""
    return set(re.findall(r"`([^`\n]+)`", text_of(document)))


def names_of_others(document: Path) -> set[str]:
    """Texts between backticks behind the first column of a table in the page on migration: of other projects."""
    if document.name != "migration.md":
        return set()
    rows = [line.partition(" | ")[2] for line in text_of(document).splitlines() if line.startswith("| ")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)} - {key.name for key in explain()}


def test_links_lead_somewhere() -> None:
    fail_with(
        f"{place(document, f']({target}')}: {target}: there is no such file: link one that is there"
        for document in DOCUMENTS
        for target in re.findall(r"\]\(([^)#]+)\)", text_of(document))
        if "://" not in target and not (document.parent / target).exists() and document.parent / target != MEASURED
    )


def test_files_and_tests_that_are_named_exist() -> None:
    fail_with(problem for document in DOCUMENTS for problem in missing_files(document))


def missing_files(document: Path) -> Iterator[str]:
    """Yield each file or test that a document names and that is not there."""
    for name in sorted(quoted(document)):
        path, _, test = name.partition("::")
        if not re.fullmatch(r"(services|gspo_core|tests|proto|deploy|examples|docs)/[\w./-]*", path):
            continue
        if not (ROOT / path).exists() and ROOT / path != MEASURED:
            yield f"{place(document, name)}: {path}: there is no such file: name one that is there"
        elif test and f"def {test}(" not in text_of(path):
            yield f"{place(document, name)}: {name}: there is no such test: name one that is there"


def test_keys_that_are_named_exist() -> None:
    known = {key.name for key in explain()}
    packages = {f"gspo.{path.name}" for path in (ROOT / "services/gspo").iterdir() if path.is_dir()}
    for_all = packages | {"environment.json"}
    fail_with(
        f"{place(document, key[0])}: {key[1]}: there is no such key: docs/config.md lists all"
        for document in DOCUMENTS
        for name in sorted(quoted(document) - for_all - names_of_others(document))
        if (key := re.fullmatch(rf"((?:{SECTIONS})\.[a-z_]+)(: .*)?", name)) and key[1] not in known
    )


def test_keys_of_the_algorithm_are_all_in_its_documents() -> None:
    text = "".join((ROOT / f"docs/{page}.md").read_text() for page in ("gspo", "objectives"))
    named = {word for name in re.findall(r"`([^`\n]+)`", text) for word in re.findall(r"[a-z_]+", name)}
    sizes = {"preset", "rollout_batch_size", "num_return_sequences_in_group", "prompt_length", "max_refill"}
    assert set(AlgorithmConfig.model_fields) - sizes - named == set()


def test_the_table_of_presets_is_what_they_are() -> None:
    page = "docs/gspo.md"
    text = text_of(page)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    (head,) = [row for row in rows if row[0] == "key" and "`grpo`" in row]
    columns = {cell.split(" ")[0].strip("`"): number for number, cell in enumerate(head)}
    table = {row[0]: row for row in rows if len(row) == len(head)}
    fail_with(
        f"{place(page, f'| {key} |')}: {key} of {preset} is {expected}: write that"
        for preset in PRESETS
        for key, expected in preset_cells(preset).items()
        if same_numbers(table[key][columns[preset]]) != same_numbers(expected)
    )


def same_numbers(cell: str) -> str:
    """Return a cell with its small numbers written in one way: 3e-4 and 0.0003 are one."""
    return re.sub(r"\d+e-\d+", lambda number: f"{float(number[0]):g}", cell)


def preset_cells(preset: str) -> dict[str, str]:
    """First cell of a row -> what the column of a preset must have there."""
    config = AlgorithmConfig.model_validate({"preset": preset})
    keys = ("adv_estimator", "importance_sampling", "loss_agg_mode", "reward_norm", "reward_clip",
            "reward_shift", "advantage_clip", "whiten_advantages", "dual_clip_loss", "objective",
            "filter_zero_spread", "overlong_buffer")  # fmt: skip
    return {f"`{key}`": _shown(getattr(config, key)) for key in keys} | {
        "clip low / high": " / ".join(f"{side:g}" for side in config.clip),
        "`num_mini_batches`, `ppo_epochs`": f"{config.num_mini_batches}, {config.ppo_epochs}",
        "`use_kl_loss`, `kl_loss_coef`": f"true, {config.kl_loss_coef:g}" if config.use_kl_loss else "false",
    }


def _shown(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return "10" if value == 10 else str(value)


def test_the_document_of_keys_is_fresh() -> None:
    text = (ROOT / "docs/config.md").read_text()
    assert GENERATED in text
    assert text.partition(GENERATED)[2].strip() == markdown("").strip(), "gspo config --markdown goes there"
    assert len(STARTING_KEYS) == 20, "more would be no beginning"


def test_the_tour_names_every_command_and_the_readme_no_other() -> None:
    named, of_readme = (
        set(re.findall(r"`gspo ([a-z]+)", (ROOT / name).read_text())) for name in ("docs/tour.md", "README.md")
    )
    commands = set(get_command(app).commands)  # type: ignore[attr-defined]
    assert named == commands > of_readme


def test_the_readme_names_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


def test_every_folder_of_code_has_its_folders_of_tests() -> None:
    table = re.findall(r"^\| (`.*/`.*?) \| (.+) \|$", text_of(ROOT / "CONTRIBUTING.md"), re.MULTILINE)
    tests = {code: words for codes, words in table for code in re.findall(r"`(.+?)`", codes)}
    folders = {f"services/gspo/{path.parent.name}/" for path in ROOT.glob("services/gspo/*/__init__.py")}
    assert folders <= tests.keys()
    for code, words in tests.items():
        assert (ROOT / code).exists()
        for name in [] if words.startswith("all") else words.split():
            assert any((ROOT / "tests" / kind / name).is_dir() for kind in ("unit", "integration")), (code, name)


def test_the_architecture_lists_every_package() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for package in (ROOT / "services/gspo").glob("*/__init__.py"):
        assert f"| `services/gspo/{package.parent.name}/` |" in text


def test_the_architecture_names_every_stream_and_hash() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for name in ("prompts", "paused_prompts", "rollouts", "scored", "eval_prompts", "eval_rollouts", "eval_scored",
                 "dead", "events", "partial", "open"):  # fmt: skip
        assert f"`{name}`" in text


def test_whole_configurations_in_documents_are_valid(tmp_path: Path) -> None:
    refused = []
    for document in (ROOT / "README.md", ROOT / "docs/recipes.md"):
        whole = [text for text in fenced(document, "yaml") if {"name", "model"} <= yaml.safe_load(text).keys()]
        assert whole, document
        for text in whole:
            try:
                parse_config(yaml.safe_load(text), tmp_path)
            except InputError as error:
                refused.append(f"{place(document, text)}: {error}")
    fail_with(refused)


def algorithm_blocks() -> dict[str, str]:
    """Name -> block of each algorithm of the recipes."""
    section = (ROOT / "docs/recipes.md").read_text().partition("## Algorithms")[2].partition("\n## ")[0]
    return dict(re.findall(r"^([A-Z][\w. +-]*?) ?[(,:].*\n\n```yaml\n([^`]*)^```", section, re.MULTILINE))


def test_each_line_of_an_algorithm_s_block_changes_something(tmp_path: Path) -> None:
    fail_with(problem for text in algorithm_blocks().values() for problem in idle_lines(text, tmp_path))


def idle_lines(text: str, folder: Path) -> Iterator[str]:
    """Yield each line of a recipe's block that changes nothing."""
    minimal = {"name": "a", "model": {"path": "m"}, "data": {"prompts": "p"}, "run": {"total_steps": 1}}
    minimal |= {"reward": {"functions": [{"path": "r.py"}]}}
    block = yaml.safe_load(text)
    whole = parse_config(minimal | block, folder)
    for section, keys in block.items():
        for key in keys:
            fewer = {other: value for other, value in keys.items() if other != key}
            try:
                without = parse_config(minimal | block | {section: fewer}, folder)
            except InputError:
                continue  # the other lines need this one
            if without == whole:
                yield f"{place('docs/recipes.md', text)}: {section}.{key} is what it would be without: take it out"


def test_the_recipes_have_a_block_for_each_algorithm(tmp_path: Path) -> None:
    assert set(algorithm_blocks()) == {
        "GSPO-token", "GRPO", "DAPO", "CISPO", "DPPO", "Dr. GRPO", "RLOO", "REINFORCE++"
    }  # fmt: skip


def test_the_recipe_makes_prompts_and_right_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its script on rows of GSM8K's form, and the reward that it names on an answer to each."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gsm8k").mkdir()
    solutions = ["Half of 48 is 24, and 48+24 = <<48+24=72>>72.\n#### 72", "It is a lot.\n#### 1,600"]
    table = pa.table({"question": ["How many?", "How much?"], "answer": solutions})
    for split in ("train", "test"):
        pq.write_table(table, tmp_path / "gsm8k" / f"{split}.parquet")
    (script,) = fenced(ROOT / "docs/recipes.md", "python")
    (tmp_path / "recipe.py").write_text(script)
    runpy.run_path(str(tmp_path / "recipe.py"))
    rows = pq.read_table(tmp_path / "eval.parquet").to_pylist()
    assert [row["answer"] for row in rows] == ["72", "1600"]
    assert rows[0]["prompt"][0]["content"].startswith("How many?\nReason step by step")
    assert [compute_score(r"So \boxed{72}.", row["answer"]) for row in rows] == [1.0, 0.0]
    assert compute_score(r"\boxed{1600.0}", rows[1]["answer"]) == 1.0


def test_the_columns_of_the_step_log_are_explained_in_their_order() -> None:
    expected = [
        (column.name, re.sub("list<item: (.*)>", r"list of \1", str(column.type)) + " or null" * column.nullable)
        for column in SCHEMA
    ]
    text = (ROOT / "docs/log.md").read_text().partition("## Token records")[0]
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert [(row[0].strip("| `"), row[1]) for row in rows] == expected


def test_the_table_of_clips_is_the_rule() -> None:
    text = (ROOT / "docs/clips.md").read_text()
    section = text.partition("## Clip and answer length")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if re.match(r"\| \d", line)]
    assert len(rows) == 7
    for length, low, high in rows:
        assert (float(low), float(high)) == fitting_clip(int(length))
